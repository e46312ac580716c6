"""The PPO dataflow, on one screen. Read `PPOTrainer.step` first.

    prompts ─> rollout ─> { old log-probs ‖ reference ‖ values ‖ rewards } ─> KL, advantages
            ─> { critic ‖ actor } ─> weight sync ─> next prompts

Every `‖` joins futures: roles on different pools run at the same time, roles on one pool take turns. Which is the case
is a matter of configuration, and this file does not know it. `run` is what the command line calls.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trainer.advantages import compute_advantage
from trainer.batch_columns import read_columns, write_columns
from trainer.config import PPOConfig
from trainer.data import PromptLoader, load_tokenizer
from trainer.kl import apply_kl_penalty, get_kl_controller
from trainer.metrics import compute_data_metrics, compute_throughout_metrics, reduce_metrics
from trainer.reward import RewardManager
from trainer.roles import WorkerGroups
from trainer.timeline import call_timings, write_timeline
from trainer.tracking import Tracking
from verl_like.future import gather
from verl_like.protocol import DataProto
from workers.weight_sync import sync_weights

Metrics = dict[str, float]
PROMPT_COLUMNS = ["input_ids", "attention_mask", "position_ids"]


class PPOTrainer:
    """Drives the roles in `groups` through PPO steps.

    To extend it, override a stage or a hook and call `run(config, MyTrainer)`.
    """

    def __init__(self, config: PPOConfig, groups: WorkerGroups, tokenizer: Any, loader: PromptLoader) -> None:
        """Nothing is computed yet; `fit` does it all."""
        self.config, self.groups, self.loader = config, groups, loader
        self.rewards = RewardManager(tokenizer)
        self.kl_ctrl = get_kl_controller(config.algorithm.kl_ctrl)
        self.global_step = 0
        self.weight_version = 0
        self.timing: Metrics = {}
        self.calls: list[dict[str, Any]] = []

    def fit(self) -> None:
        """Every step of the run; the timeline is written even when one fails."""
        folder = Path(self.config.trainer.default_local_dir)
        with Tracking(folder, self.config.trainer.logger) as tracking:
            try:
                self.init_models()
                for _, prompts in zip(range(self.loader.total_steps), self.loader, strict=False):
                    self.global_step += 1
                    tracking.log(self.timed_step(prompts), self.global_step)
            finally:
                self.rewards.close()
                write_timeline(folder / "timeline.json", self.calls + self.groups.take_calls())

    def init_models(self) -> None:
        """Build every role's model, all at once, and give the rollout the actor's weights before the first prompt."""
        steps = self.loader.total_steps
        actor_steps = max(steps - self.config.trainer.critic_warmup, 1)
        totals = {"actor": {"total_steps": actor_steps}, "critic": {"total_steps": steps}}
        gather(*(self.groups[role].init_model.remote(**totals.get(role, {})) for role in self.groups))
        self.sync()

    def timed_step(self, prompts: DataProto) -> Metrics:
        """One step with its times, by stage and by role."""
        self.timing = {}
        with self.clock("step"):
            metrics = self.step(prompts)
        calls = self.groups.take_calls()
        self.calls += calls
        return metrics | call_timings(calls, self.timing)

    def step(self, prompts: DataProto) -> Metrics:
        """One PPO step: the dataflow of this module's first lines."""
        with self.clock("gen"):
            batch = self.generate(prompts)
        with self.clock("score"):
            batch, score_metrics = self.score(batch)
        with self.clock("adv"):
            batch, kl_metrics = self.estimate(batch)
        with self.clock("update"):
            update_metrics = self.update(batch)
        with self.clock("update_weights"):
            sync_metrics = self.sync()
        return self.batch_metrics(batch) | score_metrics | kl_metrics | update_metrics | sync_metrics

    def generate(self, prompts: DataProto) -> DataProto:
        """`rollout.n` samples of every prompt. A sample is known by its uid and its index among that uid's samples."""
        num_samples = self.config.actor_rollout_ref.rollout.n
        batch = prompts.repeat(num_samples, interleave=True)
        index = torch.arange(num_samples).repeat(len(prompts))
        batch = batch.union(DataProto.from_dict({"sample_index": index}))
        samples = self.groups["rollout"].generate_sequences(batch.select([*PROMPT_COLUMNS, "sample_index"], ["uid"]))
        batch.pop(PROMPT_COLUMNS)
        return batch.union(samples)

    def score(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Four independent readings of the same samples: all launched, then joined."""
        calls = [self.rewards.remote(batch), self.groups["actor"].compute_log_prob.remote(batch)]
        if "ref" in self.groups:
            calls.append(self.groups["ref"].compute_ref_log_prob.remote(batch))
        if "critic" in self.groups:
            calls.append(self.groups["critic"].compute_values.remote(batch))
        metrics: Metrics = {}
        for result in gather(*calls):
            metrics |= result.meta_info.pop("reward_metrics", {})
            batch = batch.union(result)
        return batch, metrics

    def estimate(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Scores to rewards (less the KL, if that is asked for) to advantages and returns."""
        algorithm = self.config.algorithm
        metrics: Metrics = {}
        if algorithm.use_kl_in_reward:
            batch, metrics = apply_kl_penalty(batch, self.kl_ctrl, algorithm.kl_penalty)
        else:
            write_columns(batch, token_level_rewards=read_columns(batch, "token_level_scores")["token_level_scores"])
        batch = compute_advantage(
            batch,
            adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
        )
        return batch, metrics

    def update(self, batch: DataProto) -> Metrics:
        """Critic and actor learn at the same time, where their pools differ."""
        calls = []
        if "critic" in self.groups:
            calls.append(self.groups["critic"].update_critic.remote(batch))
        if self.global_step > self.config.trainer.critic_warmup:
            calls.append(self.groups["actor"].update_actor.remote(batch))
        metrics: Metrics = {}
        for result in gather(*calls):
            metrics |= reduce_metrics(result.meta_info["metrics"])
        return metrics

    def sync(self) -> Metrics:
        """The rollout gets the actor's weights as a new version, verified."""
        self.weight_version += 1
        return sync_weights(self.groups["actor"], self.groups["rollout"], self.weight_version)

    def batch_metrics(self, batch: DataProto) -> Metrics:
        """What the step's samples look like, and how fast they were made."""
        num_devices = sum(plan.world_size for plan in self.groups.placement.pools.values())
        seconds = {"step": sum(self.timing.values())}
        metrics = compute_data_metrics(batch, use_critic="critic" in self.groups)
        return metrics | compute_throughout_metrics(batch, seconds, num_devices)

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        """Wall time of a stage, as `timing_s/<stage>`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.timing[stage] = time.perf_counter() - began


def run(config: PPOConfig, trainer_cls: type[PPOTrainer] = PPOTrainer) -> None:
    """A whole run: data first, then the placement, then processes, then steps."""
    torch.set_num_threads(1)  # sums come out alike whatever the machine; the driver's share of the arithmetic is small
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    loader = PromptLoader(config, tokenizer)
    with WorkerGroups(config) as groups:
        print(groups.placement, flush=True)
        trainer_cls(config, groups, tokenizer, loader).fit()
