"""What a PPO run has beside its step: inputs, controllers, calls, the state of a checkpoint.

`trainer.ppo.step.PPOTrainer` adds the dataflow.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

from trainer.chaos import Fault
from trainer.data.files import check_files
from trainer.data.lm_rows import LMRow
from trainer.data.loader import RowLoader
from trainer.data.prompts import PromptLoader, load_tokenizer
from trainer.groups.nodes import begin_cluster
from trainer.groups.worker_groups import WorkerGroups
from trainer.loop import Metrics
from trainer.ppo.alarms import ALARM_RULES
from trainer.ppo.checks import check_named_rewards
from trainer.ppo.compute_advantage import check_columns
from trainer.ppo.config import PPOConfig
from trainer.ppo.entropy import get_entropy_controller
from trainer.ppo.metrics import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
)
from trainer.ppo.preflight import plan_memory, preflight
from trainer.ppo.rewards import RunningNorm, get_kl_controller
from trainer.ppo.sample_source import Draw, SampleSource, SynchronousSource
from trainer.ppo.spare_time import SpareTime
from trainer.ppo.update_samples import make_ptx_loader
from trainer.rollouts.reward_trial import try_rewards
from trainer.rollouts.samples import steps_up_to, thin_samples
from trainer.rollouts.trainer import SamplingTrainer
from trainer.run_folder.batches import KeptBatches
from trainer.run_folder.timeline import call_seconds
from verl_like.batch.protocol import DataProto
from workers.config import scores_by_rule
from workers.rewards.weighted import Rewards, make_rewards


class PPORun(SamplingTrainer):
    """A PPO run without its dataflow."""

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
        self.batches = KeptBatches(self.folder, config.trainer.max_batches_to_keep)
        self.spare_time = SpareTime()

    def make_source(self) -> SampleSource:
        """Where the samples of every step come from."""
        return SynchronousSource(self.loader, self.generate, self.make_samples)

    @abstractmethod
    def generate(self, prompts: DataProto, attempt: int = 0) -> DataProto:
        """Samples of these prompts."""

    @abstractmethod
    def make_samples(self, draw: Draw) -> tuple[DataProto, Metrics]:
        """The samples of one step."""

    # ---------------------------------------------------------------------- what the loop asks for

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
