"""The PPO dataflow, on one screen. Read `PPOTrainer.step` first.

    prompts ─> rollout ─> { old log-probs ‖ reference ‖ teacher ‖ values ‖ rewards }
            ─> KL, advantages ─> { critic ‖ actor } ─> weight sync ─> next prompts

Every `‖` joins futures: roles on different pools run at the same time, roles on one pool take
turns. Which is the case is a matter of configuration, and this file does not know it. The loop
around a step is `trainer.loop.Trainer`; how a role is called, and samples are made and scored, is
`trainer.rollouts.trainer.SamplingTrainer`. `trainer.ppo.dataflow` prints a configuration's graph.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from trainer.chaos import Fault
from trainer.data.encoded_rows import LMRow
from trainer.data.files import check_files
from trainer.data.loader import RowLoader
from trainer.data.prompts import PromptLoader, load_tokenizer
from trainer.groups.nodes import begin_cluster
from trainer.groups.worker_groups import WorkerGroups
from trainer.loop import Metrics
from trainer.ppo.alarms import ALARM_RULES
from trainer.ppo.balance import balance_ranks
from trainer.ppo.checks import check_named_rewards
from trainer.ppo.compute_advantage import (
    check_columns,
    columns_read,
    compares_with_greedy,
    compute_advantage,
    settings_of,
)
from trainer.ppo.config import PPOConfig
from trainer.ppo.dataflow import describe, old_log_probs_are_the_updates_own, own_stages
from trainer.ppo.deferred import DeferredWork
from trainer.ppo.distillation import distill
from trainer.ppo.dynamic_sampling import collect_groups
from trainer.ppo.entropy import get_entropy_controller
from trainer.ppo.memory import plan_text
from trainer.ppo.metrics import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
)
from trainer.ppo.mismatch import measures_reference, mismatch_metrics, reference_drift
from trainer.ppo.preflight import plan_memory, preflight
from trainer.ppo.rewards import RunningNorm, apply_kl_penalty, clamp_scores, get_kl_controller
from trainer.ppo.roles import Scoring, scorings_of
from trainer.ppo.sample_source import Draw, SampleSource, SynchronousSource
from trainer.ppo.sizes import batch_table
from trainer.ppo.sync import averaged_weights, update_reference
from trainer.ppo.update_samples import (
    FILTERED,
    count_by_reason,
    make_ptx_loader,
    rows_per_update,
    samples_of_update,
)
from trainer.ppo.validation import name_metrics, sample_all
from trainer.rollouts.reward_trial import try_rewards
from trainer.rollouts.samples import repeat_prompts, steps_up_to, thin_samples
from trainer.rollouts.trainer import SamplingTrainer, join_results
from trainer.run_folder.batches import SavedBatches
from trainer.run_folder.metrics import reduce_metrics
from trainer.run_folder.timeline import call_seconds
from trainer.sample_ledger import MADE
from verl_like.batch.protocol import DataProto
from verl_like.calls.future import gather
from verl_like.calls.result import Result
from workers.columns import has_column, read_columns, write_columns
from workers.config import scores_by_rule
from workers.config.conditions import teacher_is_alone
from workers.rewards.weighted import Rewards, make_rewards
from workers.weights.sync import sync_weights


class PPOTrainer(SamplingTrainer):
    """Drives the roles in `groups` through PPO steps.

    To change it, override a stage or a hook in a subclass, and name that by
    `trainer.cls=my_module.MyTrainer`. The stages are the methods that `step` calls; `trainer.hooks`
    lists the hooks, in their order.
    """

    config: PPOConfig
    stages = ("gen", "score", "adv", "update", "update_weights")
    concurrent_stages = ("score", "update")
    call_labels = {
        "compute_log_prob": "old_log_prob",
        "compute_ref_log_prob": "ref",
        "compute_values": "values",
    }
    role = "actor"
    alarm_rules = ALARM_RULES

    def __init__(
        self,
        config: PPOConfig,
        groups: WorkerGroups,
        tokenizer: Any,
        loader: PromptLoader,
        rewards: Rewards,
        ptx: RowLoader[LMRow] | None = None,
    ) -> None:
        """Nothing is computed yet; `fit` does it all."""
        super().__init__(config, groups, tokenizer, rewards)
        self.loader = loader
        self.ptx = ptx
        self.kl_ctrl = get_kl_controller(config.algorithm.kl_ctrl)
        self.entropy_ctrl = get_entropy_controller(config.actor_rollout_ref.actor)
        self.running_norm = RunningNorm(config.algorithm.running_norm)
        self.source: SampleSource = self.make_source()
        self.weight_version = 0
        self.batches = SavedBatches(self.folder, config.trainer.max_batches_to_keep)
        self.deferred = DeferredWork()

    def make_source(self) -> SampleSource:
        """Where the samples of every step come from."""
        return SynchronousSource(self.loader, self.generate, self.make_samples)

    def step(self) -> Metrics:
        """One PPO step: the dataflow of this module's first lines."""
        with self.clock("gen"):
            batch, sampled = self.source.take()
        with self.clock("score"):
            self.batches.save("score", batch, self.global_step)
            batch, scored = self.score(batch)
        with self.clock("adv"):
            self.batches.save("estimate", batch, self.global_step)
            batch, estimated = self.estimate(batch)
        with self.clock("update"):
            self.batches.save("update", batch, self.global_step)
            self.deferred.defer(partial(self.note_samples, batch))
            updated = self.update(batch)
        with self.clock("update_weights"):
            synced = self.sync() | update_reference(self.config, self.groups, self.global_step)
        noted = self.deferred.result() | self.batch_metrics(batch)
        return noted | sampled | scored | estimated | updated | synced

    # ----------------------------------------------------------------------------------- the stages

    def make_samples(self, draw: Draw) -> tuple[DataProto, Metrics]:
        """The samples of one step; with `filter_groups`, of as many draws as they take."""
        self.call_hook("on_sample_begin")
        filtered = self.config.algorithm.filter_groups
        metrics: Metrics = {}
        if filtered.enable:
            batch, metrics = collect_groups(
                lambda attempt: self.with_rewards(draw(attempt)),
                self.config.data.train_batch_size,
                filtered,
            )
            num_left_out = metrics["dynamic_sampling/num_groups_drawn"] - self.num_prompts(batch)
            num_samples = self.config.actor_rollout_ref.rollout.n
            self.count_samples(lambda: {FILTERED: int(num_left_out) * num_samples})
        else:
            batch = draw(0)

        batch, balance_metrics = self.balance(batch)
        self.call_hook("on_sample_end", batch)
        return batch, metrics | balance_metrics

    def balance(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """The samples in an order that gives the actor's ranks like numbers of tokens.

        Mini-batches stay the same samples: those of `actor.shuffle` go by numbers given before.
        """
        actor, critic = self.config.actor_rollout_ref.actor, self.config.critic
        batch = self.number_rows(batch)
        sizes = actor.ppo_mini_batch_size, critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
        num_mini_batches = math.lcm(*(self.num_prompts(batch) // size for size in sizes))
        return balance_ranks(batch, self.groups["actor"].world_size, num_mini_batches)

    def number_rows(self, batch: DataProto) -> DataProto:
        """The samples with the numbers that `actor.shuffle` goes by."""
        if self.config.actor_rollout_ref.actor.shuffle:
            return write_columns(batch, sample_number=torch.arange(len(batch)))
        return batch

    def generate(self, prompts: DataProto, attempt: int = 0) -> DataProto:
        """`rollout.n` samples of every prompt, each with the version of the policy that made it.

        A sample is known by its uid and its index among that uid's samples; `attempt` counts the
        draws of one step.
        """
        num_samples = self.config.actor_rollout_ref.rollout.n
        batch = self.roll_out(repeat_prompts(prompts, num_samples), attempt=attempt)

        if compares_with_greedy(self.config.algorithm.adv_estimator):
            baselines = self.greedy_scores(prompts).repeat_interleave(num_samples)
            batch = batch.union(DataProto.from_dict({"reward_baselines": baselines}))
        self.count_samples(lambda: {MADE: len(batch)})
        return batch

    def greedy_scores(self, prompts: DataProto) -> torch.Tensor:
        """The score of every prompt's greedy answer: what ReMax compares its samples with."""
        first = DataProto.from_dict({"sample_index": torch.zeros(len(prompts), dtype=torch.int64)})
        answers = self.roll_out(prompts.select().union(first), do_sample=False)
        answers, _ = self.with_rewards(answers)
        limit = self.config.algorithm.score_clip
        if limit is not None:  # as the scores that are compared with them
            answers, _ = clamp_scores(answers, limit)
        return read_columns(answers, "token_level_scores")["token_level_scores"].sum(dim=-1)

    def score(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Readings of the samples, and how far trainer and rollout are apart in them."""
        batch, metrics = self.once_more_if_lost(self.read_samples, batch)
        if has_column(batch, "old_log_probs"):
            metrics |= mismatch_metrics(batch)
            metrics |= reference_drift(batch, self.config, self.global_step)
        return batch, metrics

    def read_samples(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Independent readings of the same samples: all launched, then joined.

        What the batch has already is not made again, nor are old log-probs that the update itself
        will find or takes from the rollout.
        """
        calls = [] if has_column(batch, "token_level_scores") else [self.launch_rewards(batch)]
        bypasses = self.config.algorithm.rollout_correction.bypass_mode
        if not (bypasses or has_column(batch, "old_log_probs") or self.policy_is_current(batch)):
            wanted = columns_read(self.config.algorithm.adv_estimator)
            squares = {"sum_pi_squared": True} if "sum_pi_squared" in wanted else {}
            calls.append(self.call("actor", "compute_log_prob", batch, **squares))
        for scoring in self.scorings:
            if scoring.role in self.groups and not has_column(batch, scoring.column):
                calls.append(self.call(scoring.role, scoring.method, batch))

        return join_results(batch, gather(*calls))

    @functools.cached_property
    def scorings(self) -> list[Scoring]:
        """What roles say of the samples."""
        return scorings_of(self.config)

    def estimate(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Scores to rewards (less the KL, if that is asked for) to advantages; or a teacher's."""
        algorithm = self.config.algorithm
        metrics: Metrics = {}
        if algorithm.score_clip is not None:
            batch, metrics = clamp_scores(batch, algorithm.score_clip)

        scores, score_metrics = self.running_norm.scores(batch)
        metrics |= score_metrics
        if algorithm.use_kl_in_reward:
            batch, kl_metrics = apply_kl_penalty(
                batch, self.kl_ctrl, algorithm.kl_penalty, scores, algorithm.kl_penalty_per
            )
            metrics |= kl_metrics
        else:
            write_columns(batch, token_level_rewards=scores)

        if not teacher_is_alone(self.config):
            batch = compute_advantage(batch, **settings_of(algorithm))
            batch, advantage_metrics = self.running_norm.advantages(batch)
            metrics |= advantage_metrics
        batch, distilled = distill(batch, self.config)
        return batch, metrics | distilled

    def update(self, batch: DataProto) -> Metrics:
        """Critic and actor learn at the same time, where their pools differ.

        What they learn from is not always the whole batch: `samples_of_update` says.
        """
        whole = batch
        batch, metrics = samples_of_update(whole, self.config, self.global_step, self.balance)
        self.count_samples(lambda: count_by_reason(whole, batch, self.config))
        calls = []
        if "critic" in self.groups:
            calls.append(self.call("critic", "update_critic", batch))
        if self.global_step > self.config.trainer.critic_warmup:
            on_policy = self.policy_is_current(batch) and not has_column(batch, "old_log_probs")
            steered = self.entropy_ctrl.state_dict() if self.entropy_ctrl else {}
            num_rows = rows_per_update(self.config, self.num_prompts(batch))
            ptx = [] if self.ptx is None else [self.ptx.take(num_rows)]
            settings = {"on_policy": on_policy, **steered}
            calls.append(self.call("actor", "update_actor", batch, *ptx, **settings))

        self.deferred.run()
        for result in gather(*calls):
            metrics |= reduce_metrics(Result.of(result).metrics)
        if self.entropy_ctrl:
            metrics |= self.entropy_ctrl.update(metrics.get("actor/token_entropy", 0.0))
        return metrics

    def sync(self) -> Metrics:
        """The rollout gets the actor's weights as a new version, verified."""
        self.weight_version += 1
        return self.once_more_if_lost(self.send_weights)

    def send_weights(self) -> Metrics:
        """One sync, of the version that is said."""
        bucket_mb = self.config.actor_rollout_ref.rollout.update_weights_bucket_megabytes
        return sync_weights(
            self.groups["actor"], self.groups["rollout"], self.weight_version, bucket_mb
        )

    # ---------------------------------------------------------------------- what the loop asks for

    @classmethod
    def describe(cls, config: PPOConfig, max_columns: int | None = None) -> list[str]:
        """Batch sizes, memory, and the graph of a step as this class runs it."""
        graph = describe(config, max_columns, own_stages(cls, cls.recipe_class()))
        return [batch_table(config, max_columns), plan_text(config, max_columns), graph]

    @classmethod
    def recipe_class(cls) -> type[PPOTrainer]:
        """The recipe's own trainer: what a subclass of it overrides is shown as its own."""
        return PPOTrainer

    def init_models(self) -> None:
        """Build every role's model; the rollout gets its weights before the first prompt."""
        super().init_models()
        self.sync()

    def validation_metrics(self) -> Metrics:
        """Metrics of the whole validation set; its samples go to the run folder."""
        prompts = self.loader.validation
        assert prompts is not None, "a validation is due only where there are val_files"
        policy = self.config.actor_rollout_ref
        settings = asdict(policy.rollout.val_kwargs)
        score = partial(self.with_rewards, normalize=False)
        with averaged_weights(policy.actor, self.groups["actor"], self.sync):
            samples = sample_all(prompts.in_order(), self.roll_out, score, **settings)
        self.write_samples("validation", samples)
        return name_metrics(samples)

    @classmethod
    def check_code(cls, config: PPOConfig, callbacks: Sequence[object]) -> None:
        """Columns that the estimator asks for are written by someone, too."""
        super().check_code(config, callbacks)
        is_ours = cls.__module__.partition(".")[0] == "trainer"
        if is_ours and not callbacks:  # they may write columns of their own
            check_columns(config)

    @classmethod
    def prepare(cls, config: PPOConfig, at_end: ExitStack) -> tuple[Any, ...]:
        """Tokenizer, prompts, rewards and PTX rows, once models and files have been looked at.

        The cluster starts meanwhile: to import transformers takes as long.
        """
        preflight(config)
        check_files(config.data)
        begin_cluster(config, at_end)
        # workers inherit it: one bar a weight file and rank would come on top of our own
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

        tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
        loader = PromptLoader(config, tokenizer, needs_rules=scores_by_rule(config))
        rewards = make_rewards(config, tokenizer, loader.data_sources, loader.columns)
        at_end.enter_context(closing(rewards))
        ptx = make_ptx_loader(config, tokenizer)
        plan_memory(config)
        return tokenizer, loader, rewards, ptx

    @classmethod
    def look_at(cls, config: PPOConfig, *inputs: Any) -> list[str]:
        """Prompts and rewards; what is asked of rewards by name is among what they give."""
        tokenizer, loader, rewards, *_ = inputs
        num_validation = len(loader.validation) if loader.validation else 0
        count = f"{len(loader.prompts)} prompts to train on, {num_validation} to validate on"
        width = config.data.max_response_length
        scored, lines = try_rewards(rewards, loader.prompts, tokenizer, width)
        if scored is not None:
            check_named_rewards(config.algorithm, scored)
        return [count, *lines]

    @classmethod
    def worker_code(cls, config: PPOConfig) -> list[str]:
        """Those of sampling, the policy loss, the optimizer and its schedule."""
        actor = config.actor_rollout_ref.actor
        return [
            *super().worker_code(config),
            actor.policy_loss.loss_mode,
            actor.optim.optimizer,
            actor.optim.lr_scheduler_type,
        ]

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, by the number of prompts or as configured."""
        return self.loader.total_steps

    def init_arguments(self, role: str) -> dict[str, Any]:
        """The length of the learning-rate schedules of actor and critic."""
        if role == "critic":
            return {"total_steps": self.total_steps}
        if role == "actor":
            return {"total_steps": max(self.total_steps - self.config.trainer.critic_warmup, 1)}
        return {}

    @property
    def has_validation(self) -> bool:
        """Whether there are `data.val_files`."""
        return bool(self.config.data.val_files)

    def own_faults(self) -> list[Fault]:
        """A weight sync that loses a bucket."""
        return [Fault("drop_bucket", self.config.chaos.drop_bucket, self.drop_bucket)]

    def drop_bucket(self) -> dict[str, Any]:
        """The next sync loses its first bucket; which role has sent that."""
        self.groups["actor"].drop_next_bucket()
        return {"role": "actor"}

    def write_samples(self, name: str, batch: DataProto) -> None:
        """The samples of this step; those of the newest steps alone stay whole."""
        super().write_samples(name, batch)
        num_whole = self.config.trainer.max_rollouts_to_keep
        if num_whole is None:
            return
        last = self.global_step - num_whole
        for step in [last] if name == "rollouts" else steps_up_to(self.folder / name, last):
            thin_samples(self.folder / name / f"{step}.jsonl")

    def close(self) -> None:
        """End the making of samples."""
        self.source.close()

    def state_dict(self) -> dict[str, Any]:
        """What the driver itself needs to go on, as JSON has it."""
        return {
            **super().state_dict(),
            "weight_version": self.weight_version,
            "kl_coef": self.kl_ctrl.value,
            **(self.entropy_ctrl.state_dict() if self.entropy_ctrl else {}),
            "running_norm": self.running_norm.state_dict(),
            "loader": self.loader.state_dict(),
            "ptx": None if self.ptx is None else self.ptx.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; the next sync makes its weight version again."""
        super().load_state_dict(state)
        self.weight_version = state["weight_version"] - 1
        self.kl_ctrl.value = state["kl_coef"]
        if self.entropy_ctrl:
            self.entropy_ctrl.load_state_dict(state)
        self.running_norm.load_state_dict(state.get("running_norm", {}))
        self.loader.load_state_dict(state["loader"])
        if self.ptx is not None and (rows := state.get("ptx")) is not None:
            self.ptx.load_state_dict(rows)

    def note_samples(self, batch: DataProto) -> Metrics:
        """Write the step's samples to the run folder; what they look like."""
        self.write_samples("rollouts", batch)
        return compute_data_metrics(batch, use_critic="critic" in self.groups)

    def batch_metrics(self, batch: DataProto) -> Metrics:
        """How fast the step's samples were made."""
        num_devices = sum(plan.world_size for plan in self.groups.placement.pools.values())
        seconds = {"step": sum(self.timing.values())}
        timings = call_seconds(self.calls, self.call_labels) | self.timing
        return {
            **compute_throughout_metrics(batch, seconds, num_devices),
            "training/global_step": self.global_step,
            "training/epoch": self.loader.epoch,
            **compute_timing_metrics(batch, timings),
        }

    # ------------------------------------------------------------------ what the stages share

    def num_prompts(self, samples: DataProto) -> int:
        """Prompts of a step's samples: fewer in a last step of `data.total_prompts`."""
        return len(samples) // self.config.actor_rollout_ref.rollout.n

    def count_samples(self, became: Callable[[], dict[str, int]]) -> None:
        """For the ledger of a run with faults on purpose.

        Stages of the user's own make and drop what only they know: of theirs nothing is counted.
        """
        if self.config.chaos.has_faults and not own_stages(type(self), self.recipe_class()):
            self.chaos.samples.count(self.global_step, became())

    def policy_is_current(self, batch: DataProto) -> bool:
        """Whether the update's own forward pass is the old log-probs, so that no pass is needed.

        That is so if the update allows it, and every sample is of the policy as it is now.
        """
        if not old_log_probs_are_the_updates_own(self.config):
            return False
        if measures_reference(self.config, self.global_step):
            return False
        versions = read_columns(batch, "policy_version")["policy_version"]
        return bool((versions == self.weight_version).all())
