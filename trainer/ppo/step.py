"""The PPO dataflow, on one screen. Read `PPOTrainer.step` first.

    prompts ─> rollout ─> { old log-probs ‖ reference ‖ values ‖ rewards } ─> KL, advantages
            ─> { critic ‖ actor } ─> weight sync ─> next prompts

Every `‖` joins futures: roles on different pools run at the same time, roles on one pool take
turns. Which is the case is a matter of configuration, and this file does not know it. The loop
around a step is `trainer.loop.Trainer`; `trainer.ppo.dataflow` prints the graph of a configuration.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from trainer.data.lm_rows import LMRowLoader
from trainer.data.prompts import PromptLoader, load_tokenizer
from trainer.groups.worker_groups import WorkerGroups
from trainer.loop import Metrics, Trainer
from trainer.ppo.balance import balance_ranks
from trainer.ppo.call_results import join_results, numbers_of
from trainer.ppo.compute_advantage import columns_read, compute_advantage, settings_of
from trainer.ppo.config import PPOConfig
from trainer.ppo.dataflow import describe, old_log_probs_are_the_updates_own, own_stages
from trainer.ppo.dynamic_sampling import collect_groups
from trainer.ppo.entropy import get_entropy_controller
from trainer.ppo.kl import apply_kl_penalty, clamp_scores, get_kl_controller
from trainer.ppo.memory import plan_text
from trainer.ppo.metrics import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
)
from trainer.ppo.mismatch import mismatch_metrics
from trainer.ppo.preflight import preflight
from trainer.ppo.ptx import make_ptx_loader, rows_per_update
from trainer.ppo.reference import update_reference
from trainer.ppo.running_norm import RunningNorm
from trainer.ppo.sample_source import SampleSource, SynchronousSource
from trainer.ppo.samples import write_samples
from trainer.ppo.sizes import batch_table
from trainer.ppo.update_samples import samples_of_update
from trainer.ppo.validation import name_metrics, sample_all
from trainer.run_folder.timeline import call_seconds
from verl_like.batch.protocol import DataProto
from verl_like.calls.future import gather
from workers.columns import has_column, read_columns, select_reads, write_columns
from workers.config import model_rewards, rewards_of
from workers.rewards.weighted import Rewards, WeightedScores, make_rewards
from workers.roles.rollout import generate
from workers.weights.sync import sync_weights

PROMPT_COLUMNS = ["input_ids", "attention_mask", "position_ids"]


class PPOTrainer(Trainer):
    """Drives the roles in `groups` through PPO steps.

    To change it, override a stage or a hook in a subclass, and name that by
    `trainer.cls=my_module.MyTrainer`. The stages are the methods that `step` calls; `trainer.hooks`
    lists the hooks, in their order.
    """

    config: PPOConfig
    concurrent_stages = ("score", "update")
    call_labels = {
        "compute_log_prob": "old_log_prob",
        "compute_ref_log_prob": "ref",
        "compute_values": "values",
    }

    def __init__(
        self,
        config: PPOConfig,
        groups: WorkerGroups,
        tokenizer: Any,
        loader: PromptLoader,
        rewards: Rewards,
        ptx: LMRowLoader | None = None,
    ) -> None:
        """Nothing is computed yet; `fit` does it all."""
        super().__init__(config, groups)
        self.tokenizer = tokenizer
        self.loader = loader
        self.rewards = rewards
        self.ptx = ptx
        self.kl_ctrl = get_kl_controller(config.algorithm.kl_ctrl)
        self.entropy_ctrl = get_entropy_controller(config.actor_rollout_ref.actor)
        self.running_norm = RunningNorm(config.algorithm.running_norm)
        self.source: SampleSource = SynchronousSource(loader, self.make_samples)
        self.weight_version = 0

    def step(self) -> Metrics:
        """One PPO step: the dataflow of this module's first lines."""
        with self.clock("gen"):
            batch, sampled = self.source.take()
        with self.clock("score"):
            batch, scored = self.score(batch)
        with self.clock("adv"):
            batch, estimated = self.estimate(batch)
        with self.clock("update"):
            updated = self.update(batch)
        with self.clock("update_weights"):
            synced = self.sync() | update_reference(self.config, self.groups, self.global_step)
        self.write_samples("rollouts", batch)
        return self.batch_metrics(batch) | sampled | scored | estimated | updated | synced

    # ----------------------------------------------------------------------------------- the stages

    def make_samples(self, prompts: Iterator[DataProto]) -> tuple[DataProto, Metrics]:
        """The samples of one step; with `filter_groups`, of as many draws as they take."""
        self.on_sample_begin()
        filtered = self.config.algorithm.filter_groups
        metrics: Metrics = {}
        if filtered.enable:
            batch, metrics = collect_groups(
                lambda attempt: self.with_rewards(self.generate(next(prompts), attempt)),
                self.config.data.train_batch_size,
                filtered,
            )
        else:
            batch = self.generate(next(prompts))

        batch, balance_metrics = self.balance(batch)
        self.on_sample_end(batch)
        return batch, metrics | balance_metrics

    def balance(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """The samples in an order that gives the actor's ranks like numbers of tokens.

        Mini-batches stay the same samples: those of `actor.shuffle` go by numbers given before.
        """
        actor, critic = self.config.actor_rollout_ref.actor, self.config.critic
        if actor.shuffle:
            batch = write_columns(batch, sample_number=torch.arange(len(batch)))
        sizes = actor.ppo_mini_batch_size, critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
        num_mini_batches = math.lcm(*(self.config.data.train_batch_size // size for size in sizes))
        return balance_ranks(batch, self.groups["actor"].world_size, num_mini_batches)

    def generate(self, prompts: DataProto, attempt: int = 0) -> DataProto:
        """`rollout.n` samples of every prompt, each with the version of the policy that made it.

        A sample is known by its uid and its index among that uid's samples; `attempt` counts the
        draws of one step.
        """
        num_samples = self.config.actor_rollout_ref.rollout.n
        batch = prompts.repeat(num_samples, interleave=True)
        index = torch.arange(num_samples).repeat(len(prompts))
        batch = batch.union(DataProto.from_dict({"sample_index": index}))
        batch = self.roll_out(batch, attempt=attempt)

        if self.config.algorithm.adv_estimator == "remax":
            baselines = self.greedy_scores(prompts).repeat_interleave(num_samples)
            batch = batch.union(DataProto.from_dict({"reward_baselines": baselines}))
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

    def roll_out(self, batch: DataProto, **settings: Any) -> DataProto:
        """The rows of prompts with a response each; `settings` go before those of the batch."""
        asked = self.needed(batch, "rollout", "generate_sequences")
        asked.meta_info = asked.meta_info | settings
        samples = generate(self.groups["rollout"], asked)

        version = samples.meta_info.pop("policy_version")
        versions = torch.full((len(samples),), version, dtype=torch.int64)
        batch.pop(PROMPT_COLUMNS)
        samples.meta_info = {}
        return write_columns(batch.union(samples), policy_version=versions)

    def with_rewards(self, batch: DataProto, normalize: bool = True) -> tuple[DataProto, Metrics]:
        """The batch with its scores, waited for: for what must see them before the score stage."""
        return join_results(batch, [self.launch_rewards(batch, normalize).get()])

    def launch_rewards(self, batch: DataProto, normalize: bool = True) -> WeightedScores:
        """The future of `token_level_scores`: all rewards at the same time, added up by weight."""
        calls = {
            reward.name: partial(self.call, role, "compute_rm_score")
            for role, reward in model_rewards(self.config).items()
        }
        return self.rewards.launch(batch, lambda reward: calls[reward.name](batch), normalize)

    def score(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Independent readings of the same samples: all launched, then joined.

        Scores that the batch has already are not made again, nor are old log-probs that the update
        itself will find or takes from the rollout.
        """
        calls = [] if has_column(batch, "token_level_scores") else [self.launch_rewards(batch)]
        bypasses = self.config.algorithm.rollout_correction.bypass_mode
        if not (bypasses or self.policy_is_current(batch)):
            wanted = columns_read(self.config.algorithm.adv_estimator)
            squares = {"sum_pi_squared": True} if "sum_pi_squared" in wanted else {}
            calls.append(self.call("actor", "compute_log_prob", batch, **squares))
        if "ref" in self.groups:
            calls.append(self.call("ref", "compute_ref_log_prob", batch))
        if "critic" in self.groups:
            calls.append(self.call("critic", "compute_values", batch))

        batch, metrics = join_results(batch, gather(*calls))
        if has_column(batch, "old_log_probs"):
            metrics |= mismatch_metrics(batch)
        return batch, metrics

    def estimate(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Scores to rewards (less the KL, if that is asked for) to advantages and returns."""
        algorithm = self.config.algorithm
        metrics: Metrics = {}
        if algorithm.score_clip is not None:
            batch, metrics = clamp_scores(batch, algorithm.score_clip)

        scores, score_metrics = self.running_norm.scores(batch)
        metrics |= score_metrics
        if algorithm.use_kl_in_reward:
            batch, kl_metrics = apply_kl_penalty(batch, self.kl_ctrl, algorithm.kl_penalty, scores)
            metrics |= kl_metrics
        else:
            write_columns(batch, token_level_rewards=scores)

        batch = compute_advantage(batch, **settings_of(algorithm))
        batch, advantage_metrics = self.running_norm.advantages(batch)
        return batch, metrics | advantage_metrics

    def update(self, batch: DataProto) -> Metrics:
        """Critic and actor learn at the same time, where their pools differ.

        What they learn from is not always the whole batch: `samples_of_update` says.
        """
        batch, metrics = samples_of_update(batch, self.config, self.global_step, self.balance)
        calls = []
        if "critic" in self.groups:
            calls.append(self.call("critic", "update_critic", batch))
        if self.global_step > self.config.trainer.critic_warmup:
            on_policy = self.policy_is_current(batch) and not has_column(batch, "old_log_probs")
            steered = self.entropy_ctrl.state_dict() if self.entropy_ctrl else {}
            ptx = [] if self.ptx is None else [self.ptx.take(rows_per_update(self.config))]
            settings = {"on_policy": on_policy, **steered}
            calls.append(self.call("actor", "update_actor", batch, *ptx, **settings))

        for result in gather(*calls):
            metrics |= numbers_of(result)
        if self.entropy_ctrl:
            metrics |= self.entropy_ctrl.update(metrics.get("actor/token_entropy", 0.0))
        return metrics

    def sync(self) -> Metrics:
        """The rollout gets the actor's weights as a new version, verified."""
        self.weight_version += 1
        bucket_mb = self.config.actor_rollout_ref.rollout.update_weights_bucket_megabytes
        return sync_weights(
            self.groups["actor"], self.groups["rollout"], self.weight_version, bucket_mb
        )

    # ---------------------------------------------------------------------- what the loop asks for

    @classmethod
    def prepare(cls, config: PPOConfig, at_end: ExitStack) -> tuple[Any, ...]:
        """Tokenizer, prompts, rewards and PTX rows, once models and pools have been looked at."""
        preflight(config)
        # workers inherit it: one bar a weight file and rank would come on top of our own
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

        tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
        loader = PromptLoader(config, tokenizer)
        overlong = config.reward_model.overlong_buffer
        rewards = make_rewards(rewards_of(config), tokenizer, loader.data_sources, overlong)
        at_end.enter_context(closing(rewards))
        return tokenizer, loader, rewards, make_ptx_loader(config, tokenizer)

    @classmethod
    def worker_code(cls, config: PPOConfig) -> list[str]:
        """Worker classes, the policy loss, the optimizer and its schedule."""
        actor = config.actor_rollout_ref.actor
        return [
            *super().worker_code(config),
            actor.policy_loss.loss_mode,
            actor.optim.optimizer,
            actor.optim.lr_scheduler_type,
        ]

    @classmethod
    def describe(cls, config: PPOConfig, max_columns: int | None = None) -> list[str]:
        """Batch sizes, memory, and the graph of a step as this class runs it."""
        graph = describe(config, max_columns, own_stages(cls, PPOTrainer))
        return [batch_table(config, max_columns), plan_text(config, max_columns), graph]

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

    def init_models(self) -> None:
        """Build every role's model; the rollout gets its weights before the first prompt."""
        super().init_models()
        self.sync()

    @property
    def has_validation(self) -> bool:
        """Whether there are `data.val_files`."""
        return bool(self.config.data.val_files)

    def validation_metrics(self) -> Metrics:
        """Metrics of the whole validation set; its samples go to the run folder."""
        prompts = self.loader.validation
        assert prompts is not None, "a validation is due only where there are val_files"
        settings = asdict(self.config.actor_rollout_ref.rollout.val_kwargs)
        score = partial(self.with_rewards, normalize=False)
        samples = sample_all(prompts.in_order(), self.roll_out, score, **settings)
        self.write_samples("validation", samples)
        return name_metrics(samples)

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
        self.running_norm.load_state_dict(state["running_norm"])
        self.loader.load_state_dict(state["loader"])
        if self.ptx is not None and state["ptx"] is not None:
            self.ptx.load_state_dict(state["ptx"])

    # ------------------------------------------------------------------ what the stages share

    def call(
        self, role: str, method: str, batch: DataProto, *more: DataProto, **settings: Any
    ) -> Any:
        """The future of a role's method, which gets the columns that it reads.

        `settings` travel in the batch's meta_info; `more` batches go as they are.
        """
        sent = self.needed(batch, role, method)
        if settings:
            sent = sent.select()
            sent.meta_info = sent.meta_info | settings
        return getattr(self.groups[role], method).remote(sent, *more)

    def needed(self, batch: DataProto, role: str, method: str) -> DataProto:
        """The columns that the role's class says the method reads; all, if it says nothing."""
        return select_reads(batch, self.groups[role].roles[role], method)

    def policy_is_current(self, batch: DataProto) -> bool:
        """Whether the update's own forward pass is the old log-probs, so that no pass is needed.

        That is so if the update allows it, and every sample is of the policy as it is now.
        """
        if not old_log_probs_are_the_updates_own(self.config):
            return False
        versions = read_columns(batch, "policy_version")["policy_version"]
        return bool((versions == self.weight_version).all())

    def write_samples(self, name: str, batch: DataProto) -> None:
        """The samples of this step as text, in a folder of that name."""
        write_samples(self.folder / name, self.global_step, batch, self.tokenizer)

    def batch_metrics(self, batch: DataProto) -> Metrics:
        """What the step's samples look like, and how fast they were made."""
        num_devices = sum(plan.world_size for plan in self.groups.placement.pools.values())
        seconds = {"step": sum(self.timing.values())}
        timings = call_seconds(self.calls, self.call_labels) | self.timing
        return {
            **compute_data_metrics(batch, use_critic="critic" in self.groups),
            **compute_throughout_metrics(batch, seconds, num_devices),
            "training/global_step": self.global_step,
            "training/epoch": self.loader.epoch,
            **compute_timing_metrics(batch, timings),
        }
