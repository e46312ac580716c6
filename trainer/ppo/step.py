"""The PPO dataflow, on one screen. Read `PPOTrainer.step` first.

    prompts ─> rollout ─> { old log-probs ‖ reference ‖ teacher ‖ values ‖ rewards }
            ─> KL, advantages ─> { critic ‖ actor } ─> weight sync ─> next prompts

Every `‖` joins futures: roles on different pools run at the same time, roles on one pool take
turns. Which is the case is a matter of configuration, and this file does not know it. What a stage
computes on the driver stands in the file of its name: `sample`, `score`, `estimate`, `update`,
`sync`, `validate`. How a role is called is `trainer.rollouts.trainer.SamplingTrainer`, the loop
around a step `trainer.loop.Trainer`; `trainer.ppo.prepare` has what comes before a process starts,
`trainer.ppo.dataflow` prints a configuration's graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from trainer.chaos import MADE, Fault
from trainer.config.devices import devices_of
from trainer.data.encoded_rows import LMRow
from trainer.data.loader import RowLoader
from trainer.data.prompts import PromptLoader
from trainer.groups.worker_groups import WorkerGroups
from trainer.loop import Metrics
from trainer.ppo import prepare, sample, score, validate
from trainer.ppo.alarms import ALARM_RULES
from trainer.ppo.compute_advantage import check_columns, compares_with_greedy
from trainer.ppo.config import PPOConfig
from trainer.ppo.dataflow import describe, overlaps, own_stages
from trainer.ppo.deferred import DeferredWork
from trainer.ppo.estimate import Estimation, clamp_scores
from trainer.ppo.memory import engine_rests, plan_text
from trainer.ppo.metrics import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
)
from trainer.ppo.roles import scorings_of
from trainer.ppo.sizes import batch_line, batch_table
from trainer.ppo.sync import averaged_weights, send_weights, update_reference
from trainer.ppo.tokens import OWN_CODE, TokenLedger, num_tokens
from trainer.ppo.update import EntropyController, rows_per_update, samples_of_update
from trainer.rollouts.samples import repeat_prompts, thin_old_samples, thin_samples
from trainer.rollouts.trainer import SamplingTrainer, join_results
from trainer.run_folder.batches import SavedBatches
from trainer.run_folder.metrics import reduce_metrics
from trainer.run_folder.timeline import call_seconds
from verl_like.batch.protocol import DataProto
from verl_like.calls.future import gather
from verl_like.calls.result import Result
from workers.agents.players import faults_of
from workers.columns import has_column, read_columns
from workers.rewards.weighted import Rewards
from workers.rollout.draws import check_draws


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
        """No model is loaded before `fit`."""
        super().__init__(config, groups, tokenizer, rewards)
        self.loader = loader
        self.ptx = ptx
        self.scorings = scorings_of(config)
        self.estimation = Estimation(config)
        self.entropy_ctrl = EntropyController(config.actor_rollout_ref.actor)
        self.source: sample.SampleSource = self.make_source()
        self.weight_version = 0
        self.batches = SavedBatches(self.folder, config.trainer.max_batches_to_keep)
        self.deferred = DeferredWork()
        self.tokens = TokenLedger()

    def make_source(self) -> sample.SampleSource:
        """Where the samples of every step come from."""
        return sample.SynchronousSource(self.loader, self.generate, self.make_samples)

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

    def make_samples(self, draw: sample.Draw) -> tuple[DataProto, Metrics]:
        """The samples of one step; with `filter_groups`, of as many draws as they take."""
        self.call_hook("on_sample_begin")
        filtered = self.config.algorithm.filter_groups
        metrics: Metrics = {}
        draw, self.tokens = self.noting(draw), TokenLedger()
        if filtered.enable:
            batch, metrics = sample.collect_groups(
                lambda attempt: self.with_rewards(draw(attempt)),
                self.config.data.train_batch_size,
                filtered,
            )
            num_left_out = metrics["dynamic_sampling/num_groups_drawn"] - self.num_prompts(batch)
            num_samples = self.config.actor_rollout_ref.rollout.n
            self.count_samples({sample.FILTERED: int(num_left_out) * num_samples})
            left = self.tokens.drawn - self.tokens.left_out.total()
            self.tokens.leave(sample.FILTERED, left - num_tokens(batch))
        else:
            batch = draw(0)

        batch, balance_metrics = self.balance(batch)
        self.call_hook("on_sample_end", batch)
        return batch, metrics | balance_metrics

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
        self.count_samples({MADE: len(batch)})
        return batch

    def greedy_scores(self, prompts: DataProto) -> torch.Tensor:
        """The score of every prompt's greedy answer: what ReMax compares its samples with."""
        answers = self.roll_out(repeat_prompts(prompts, 1), do_sample=False)
        answers, _ = self.with_rewards(answers)
        limit = self.config.algorithm.score_clip
        if limit is not None:  # as the scores that are compared with them
            answers, _ = clamp_scores(answers, limit)
        return read_columns(answers, "token_level_scores")["token_level_scores"].sum(dim=-1)

    def balance(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """The samples in an order that gives the actor's ranks like numbers of tokens."""
        num_ranks = len(self.groups["actor"].update_actor.collecting_ranks())
        return sample.balance(batch, self.config, num_ranks)

    def score(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Readings of the samples, and how far trainer and rollout are apart in them."""
        batch, metrics = self.once_more_if_lost(self.read_samples, batch)
        if has_column(batch, "old_log_probs"):
            metrics |= score.mismatch_metrics(batch)
            metrics |= score.reference_drift(batch, self.config, self.global_step)
        return batch, metrics

    def read_samples(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Independent readings of the same samples: all launched, then joined.

        What the batch has already is not made again.
        """
        self.rest_engine()
        calls = [] if has_column(batch, "token_level_scores") else [self.launch_rewards(batch)]
        is_current = self.policy_is_current(batch)
        for reading in score.readings(self.scorings, self.config, is_current):
            if reading.role in self.groups and not has_column(batch, reading.column):
                asked = score.columns_asked(reading, self.config)
                calls.append(self.call(reading.role, reading.method, batch, **asked))

        return join_results(batch, gather(*calls))

    def rest_engine(self) -> None:
        """The rollout gives the memory of its devices to those that share them, until `sync`."""
        device_type = devices_of(self.config.trainer).type
        if "rollout" in self.groups and engine_rests(self.config, device_type):
            self.groups["rollout"].sleep()

    def estimate(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Scores to rewards (less the KL, if that is asked for) to advantages; or a teacher's."""
        return self.estimation(batch)

    def update(self, batch: DataProto) -> Metrics:
        """Critic and actor learn at the same time, where their pools differ.

        What they learn from is not always the whole batch: `samples_of_update` says.
        """
        proven = check_draws(batch)
        tokens, self.tokens = self.tokens, TokenLedger()
        tokens.reach_update(num_tokens(batch), OWN_CODE if self.has_own_code else None)
        became: Counter[str] | None = Counter() if self.keeps_ledger else None
        batch, metrics = samples_of_update(
            batch, self.config, self.global_step, self.balance, became, tokens
        )
        self.count_samples(became or {})
        proven |= tokens.metrics(num_tokens(batch, self.config.algorithm.use_pf_ppo))
        calls = []
        if "critic" in self.groups:
            calls.append(self.call("critic", "update_critic", batch))
        if self.global_step > self.config.trainer.critic_warmup:
            on_policy = self.policy_is_current(batch) and not has_column(batch, "old_log_probs")
            settings = {"on_policy": on_policy, **self.entropy_ctrl.state_dict()}
            num_rows = rows_per_update(self.config, self.num_prompts(batch))
            ptx = [] if self.ptx is None else [self.ptx.take(num_rows)]
            calls.append(self.call("actor", "update_actor", batch, *ptx, **settings))

        self.deferred.run()
        metrics |= proven
        for result in gather(*calls):
            metrics |= reduce_metrics(Result.of(result).metrics)
        return metrics | self.entropy_ctrl.update(metrics.get("actor/token_entropy", 0.0))

    def sync(self) -> Metrics:
        """The rollout gets the actor's weights as a new version, verified."""
        self.weight_version += 1
        return self.once_more_if_lost(self.send_weights)

    def send_weights(self) -> Metrics:
        """One sync, of the version that is said."""
        return send_weights(self.config, self.groups, self.weight_version)

    def validation_metrics(self) -> Metrics:
        """Metrics of the whole validation set; its samples go to the run folder."""
        prompts = self.loader.validation
        assert prompts is not None, "a validation is due only where there are val_files"
        policy = self.config.actor_rollout_ref
        settings = asdict(policy.rollout.val_kwargs)
        with_scores = partial(self.with_rewards, normalize=False)
        with averaged_weights(policy.actor, self.groups["actor"], self.sync):
            samples = validate.sample_all(
                prompts.in_order(), self.roll_out, with_scores, **settings
            )
        self.write_samples("validation", samples)
        return validate.name_metrics(samples)

    # ------------------------------------------------------------------ what the stages share

    def num_prompts(self, samples: DataProto) -> int:
        """Prompts of a step's samples: fewer in a last step of `data.total_prompts`."""
        return len(samples) // self.config.actor_rollout_ref.rollout.n

    def policy_is_current(self, batch: DataProto) -> bool:
        """Whether the update's own forward pass is the old log-probs, so that no pass is needed.

        That is so if the update allows it, and every sample is of the policy as it is now.
        """
        if not score.update_finds_old_log_probs(self.config, self.global_step):
            return False
        versions = read_columns(batch, "policy_version")["policy_version"]
        return bool((versions == self.weight_version).all())

    @property
    def keeps_ledger(self) -> bool:
        """Whether this is a run with faults on purpose, whose samples are counted.

        Stages of the user's own make and drop what only they know: of theirs nothing is counted.
        """
        return self.config.chaos.has_faults and not own_stages(type(self), self.recipe_class())

    def count_samples(self, became: Mapping[str, int]) -> None:
        """So many samples of this step were made, trained on, or dropped for a reason."""
        if self.keeps_ledger:
            self.chaos.samples.count(self.global_step, dict(became))

    @property
    def has_own_code(self) -> bool:
        """Whether hooks or stages of the user's own may have changed a batch."""
        return bool(self.callbacks) or type(self) is not self.recipe_class()

    def noting(self, draw: sample.Draw) -> sample.Draw:
        """Samples whose tokens are counted, and whose faults on purpose are in `chaos.jsonl`."""

        def noted(attempt: int) -> DataProto:
            batch = draw(attempt)
            self.tokens.draw(batch)
            for kind, count in faults_of(batch).items():
                self.chaos.note(kind, self.global_step, count=count)
            return batch

        return noted

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

    def write_samples(self, name: str, batch: DataProto) -> None:
        """The samples of this step; those of the newest steps alone stay whole."""
        super().write_samples(name, batch)
        num_whole = self.config.trainer.max_rollouts_to_keep
        if num_whole is None:
            return
        last = self.global_step - num_whole
        if name == "rollouts":  # every step has some, and has been thinned in its turn
            thin_samples(self.folder / name / f"{last}.jsonl")
        else:
            thin_old_samples(self.folder / name, last)

    # ---------------------------------------------------------------------- what the loop asks for

    @classmethod
    def describe(
        cls, config: PPOConfig, max_columns: int | None = None, brief: bool = False
    ) -> list[str]:
        """Batch sizes, memory, and the graph of a step as this class runs it."""
        memory = plan_text(config, max_columns, brief=brief)
        if brief:
            return [batch_line(config), memory, overlaps(config)]
        graph = describe(config, max_columns, own_stages(cls, cls.recipe_class()))
        return [batch_table(config, max_columns), memory, graph]

    @classmethod
    def recipe_class(cls) -> type[PPOTrainer]:
        """The recipe's own trainer: what a subclass of it overrides is shown as its own."""
        return PPOTrainer

    @classmethod
    def check_code(cls, config: PPOConfig, callbacks: Sequence[object]) -> None:
        """Columns that the estimator asks for are written by someone, too."""
        super().check_code(config, callbacks)
        is_ours = cls.__module__.partition(".")[0] == "trainer"
        if is_ours and not callbacks:  # they may write columns of their own
            check_columns(config)

    @classmethod
    def prepare(cls, config: PPOConfig, at_end: ExitStack) -> tuple[Any, ...]:
        """Tokenizer, prompts, rewards and PTX rows."""
        return prepare.prepare(config, at_end)

    @classmethod
    def look_at(cls, config: PPOConfig, *inputs: Any) -> list[str]:
        """Lines of a dry run about prompts and rewards."""
        return prepare.look_at(config, *inputs)

    @classmethod
    def worker_code(cls, config: PPOConfig) -> list[str]:
        """Dotted paths for sampling, and of the policy loss, the optimizer and its schedule."""
        actor = config.actor_rollout_ref.actor
        code = actor.policy_loss.loss_mode, actor.optim.optimizer, actor.optim.lr_scheduler_type
        return [*super().worker_code(config), *code]

    def init_models(self) -> None:
        """Build every role's model; the rollout gets its weights before the first prompt."""
        super().init_models()
        self.sync()

    def init_arguments(self, role: str) -> dict[str, Any]:
        """The length of the learning-rate schedules of actor and critic."""
        if role == "critic":
            return {"total_steps": self.total_steps}
        if role == "actor":
            return {"total_steps": max(self.total_steps - self.config.trainer.critic_warmup, 1)}
        return {}

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, by the number of prompts or as configured."""
        return self.loader.total_steps

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

    def close(self) -> None:
        """End the making of samples."""
        self.source.close()

    def state_dict(self) -> dict[str, Any]:
        """What the driver itself needs to go on, as JSON has it."""
        return {
            **super().state_dict(),
            "weight_version": self.weight_version,
            **self.estimation.state_dict(),
            **self.entropy_ctrl.state_dict(),
            "loader": self.loader.state_dict(),
            "ptx": None if self.ptx is None else self.ptx.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; the next sync makes its weight version again."""
        super().load_state_dict(state)
        self.weight_version = state["weight_version"] - 1
        self.estimation.load_state_dict(state)
        self.entropy_ctrl.load_state_dict(state)
        self.loader.load_state_dict(state["loader"])
        if self.ptx is not None and (rows := state.get("ptx")) is not None:
            self.ptx.load_state_dict(rows)
