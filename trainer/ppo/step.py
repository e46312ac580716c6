"""The PPO dataflow, on one screen. Read `PPOTrainer.step` first.

    prompts ─> rollout ─> { old log-probs ‖ reference ‖ values ‖ rewards } ─> KL, advantages
            ─> { critic ‖ actor } ─> weight sync ─> next prompts

Every `‖` joins futures: roles on different pools run at the same time, roles on one pool take
turns. Which is the case is a matter of configuration, and this file does not know it.
`trainer.launch.run` makes the trainer and calls `fit`; `trainer.ppo.dataflow` prints the graph of a
configuration.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trainer.data.prompts import PromptLoader
from trainer.groups.worker_groups import WorkerGroups
from trainer.hooks import Hooks
from trainer.ppo.balance import balance_ranks
from trainer.ppo.compute_advantage import compute_advantage
from trainer.ppo.config import PPOConfig
from trainer.ppo.dataflow import old_log_probs_are_the_updates_own
from trainer.ppo.dynamic_sampling import collect_groups
from trainer.ppo.kl import apply_kl_penalty, clamp_scores, get_kl_controller
from trainer.ppo.mismatch import mismatch_metrics
from trainer.ppo.sample_source import SampleSource, SynchronousSource
from trainer.ppo.validation import validation_is_due, validation_metrics
from trainer.run_folder.checkpoint import Checkpoints
from trainer.run_folder.folder import write_samples
from trainer.run_folder.metrics import (
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    reduce_metrics,
)
from trainer.run_folder.stopping import reached_goal
from trainer.run_folder.timeline import Timeline, call_seconds, call_timings
from trainer.run_folder.tracking import make_tracking
from verl_like.batch.protocol import DataProto
from verl_like.calls.future import gather
from workers.columns import has_column, read_columns, select_reads, write_columns
from workers.rewards.manager import RewardManager, SummedScores
from workers.roles.rollout import generate
from workers.weights.sync import sync_weights

Metrics = dict[str, float]
PROMPT_COLUMNS = ["input_ids", "attention_mask", "position_ids"]


class PPOTrainer(Hooks):
    """Drives the roles in `groups` through PPO steps.

    To extend it, override a stage or a hook in a subclass.

    `trainer.cls=my_module.MyTrainer` then runs it. The stages are the methods that `step` calls;
    `trainer.hooks` lists the hooks, in their order.
    """

    def __init__(
        self,
        config: PPOConfig,
        groups: WorkerGroups,
        tokenizer: Any,
        loader: PromptLoader,
        rewards: RewardManager,
    ) -> None:
        """Nothing is computed yet; `fit` does it all."""
        self.config, self.groups, self.tokenizer, self.loader, self.rewards = (
            config,
            groups,
            tokenizer,
            loader,
            rewards,
        )
        self.folder = Path(config.trainer.default_local_dir)
        self.kl_ctrl = get_kl_controller(config.algorithm.kl_ctrl)
        self.source: SampleSource = SynchronousSource(loader, self.make_samples)
        self.checkpoints = Checkpoints(config)
        self.global_step = 0
        self.weight_version = 0
        self.timing: Metrics = {}
        self.calls: list[dict[str, Any]] = []

    def fit(self) -> None:
        """Every step of the run."""
        self.checkpoints.cut_back()
        with make_tracking(self.config, self.loader.total_steps) as tracking:
            timeline = Timeline(self.folder / "timeline.json", resume=self.checkpoints.goes_on_here)
            try:
                with self.clock("init"):
                    self.init_models()
                self.on_init_end()
                self.on_train_begin()
                if self.global_step == 0 and (scores := self.validate()):
                    tracking.log(scores, 0)
                timeline.add(self.take_calls())  # or the first step's times would begin with these
                while self.global_step < self.loader.total_steps:
                    self.global_step += 1
                    metrics = self.timed_step()
                    done = reached_goal(metrics, self.config.trainer.stop_at)
                    try:
                        metrics |= self.save(is_last=bool(done))
                    finally:
                        timeline.add(self.take_calls())
                        tracking.log(metrics, self.global_step)
                    # only now: a resume finds the line of the step that it goes on from
                    self.checkpoints.commit()
                    if done:
                        print(done, flush=True)
                        break
            finally:
                self.source.close()
                timeline.add(self.take_calls())
                self.on_train_end()

    def init_models(self) -> None:
        """Build every role's model, all at once; give the rollout the actor's weights before the
        first prompt.
        """
        steps = self.loader.total_steps
        actor_steps = max(steps - self.config.trainer.critic_warmup, 1)
        totals = {"actor": {"total_steps": actor_steps}, "critic": {"total_steps": steps}}
        gather(
            *(self.groups[role].init_model.remote(**totals.get(role, {})) for role in self.groups)
        )
        self.resume()
        self.sync()

    def timed_step(self) -> Metrics:
        """One step between its hooks, with its times by stage and by role."""
        self.timing = {}
        self.on_step_begin()
        with self.clock("step"):
            metrics = self.step()
        metrics |= call_timings(self.calls, self.timing)
        metrics |= self.validate()
        self.on_step_end(metrics)
        return metrics

    def step(self) -> Metrics:
        """One PPO step: the dataflow of this module's first lines."""
        with self.clock("gen"):
            batch = self.source.take()
        with self.clock("score"):
            batch, score_metrics = self.score(batch)
        with self.clock("adv"):
            batch, kl_metrics = self.estimate(batch)
        with self.clock("update"):
            update_metrics = self.update(batch)
        with self.clock("update_weights"):
            sync_metrics = self.sync()
        metrics = (
            self.batch_metrics(batch) | score_metrics | kl_metrics | update_metrics | sync_metrics
        )
        write_samples(self.folder / "rollouts", self.global_step, batch, self.tokenizer)
        return metrics

    # ----------------------------------------------------------------------------------- the stages

    def make_samples(self, prompts: Iterator[DataProto]) -> DataProto:
        """The samples of one step, and with `filter_groups` as many
        draws of prompts as they take.
        """
        self.on_sample_begin()
        filtered = self.config.algorithm.filter_groups
        if filtered.enable:
            batch, metrics = collect_groups(
                lambda attempt: self.with_rewards(self.generate(next(prompts), attempt)),
                self.config.data.train_batch_size,
                filtered,
            )
            batch.meta_info["metrics"] = metrics
        else:
            batch = self.generate(next(prompts))
        batch = self.balance(batch)
        self.on_sample_end(batch)
        return batch

    def balance(self, batch: DataProto) -> DataProto:
        """The samples in an order that gives the ranks of the actor like numbers of tokens;
        mini-batches stay.
        """
        actor, critic = self.config.actor_rollout_ref.actor, self.config.critic
        sizes = actor.ppo_mini_batch_size, critic.ppo_mini_batch_size or actor.ppo_mini_batch_size
        num_mini_batches = math.lcm(*(self.config.data.train_batch_size // size for size in sizes))
        batch, metrics = balance_ranks(batch, self.groups["actor"].world_size, num_mini_batches)
        batch.meta_info["metrics"] = batch.meta_info.get("metrics", {}) | metrics
        return batch

    def generate(self, prompts: DataProto, attempt: int = 0) -> DataProto:
        """`rollout.n` samples of every prompt, each with the version of the policy that made it.

        A sample is known by its uid and its index among that uid's samples; `attempt` counts the
        draws of one step.
        """
        num_samples = self.config.actor_rollout_ref.rollout.n
        batch = prompts.repeat(num_samples, interleave=True)
        index = torch.arange(num_samples).repeat(len(prompts))
        batch = self.roll_out(
            batch.union(DataProto.from_dict({"sample_index": index})), attempt=attempt
        )
        if self.config.algorithm.adv_estimator == "remax":
            baselines = self.greedy_scores(prompts).repeat_interleave(num_samples)
            batch = batch.union(DataProto.from_dict({"reward_baselines": baselines}))
        return batch

    def greedy_scores(self, prompts: DataProto) -> torch.Tensor:
        """The score of every prompt's greedy answer: what ReMax compares its samples with."""
        first = DataProto.from_dict({"sample_index": torch.zeros(len(prompts), dtype=torch.int64)})
        answers = self.roll_out(prompts.select().union(first), do_sample=False)
        return read_columns(self.with_rewards(answers), "token_level_scores")[
            "token_level_scores"
        ].sum(dim=-1)

    def roll_out(self, batch: DataProto, **settings: Any) -> DataProto:
        """The rows of prompts with a response each; `settings` go to the rollout beside the batch's
        own.
        """
        asked = self.needed(batch, "rollout", "generate_sequences")
        asked.meta_info = asked.meta_info | settings
        samples = generate(self.groups["rollout"], asked)
        version = torch.full(
            (len(samples),), samples.meta_info.pop("policy_version"), dtype=torch.int64
        )
        batch.pop(PROMPT_COLUMNS)
        samples.meta_info = {}
        return write_columns(batch.union(samples), policy_version=version)

    def with_rewards(self, batch: DataProto) -> DataProto:
        """The batch with its scores, waited for: for what must see them before the score stage."""
        rewards = self.launch_rewards(batch).get()
        metrics = rewards.meta_info.pop("reward_metrics", {})
        batch = batch.union(rewards)
        batch.meta_info["metrics"] = metrics
        return batch

    def launch_rewards(self, batch: DataProto) -> Any:
        """The future of `token_level_scores`: the rules' scores, with those of a reward model where
        there is one.
        """
        rules = self.rewards.remote(batch)
        if "reward_model" not in self.groups:
            return rules
        model = self.call("reward_model", "compute_rm_score", batch)
        return SummedScores(rules, model, self.config.reward_model.rule_weight)

    def score(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Independent readings of the same samples: all launched, then joined.

        Readings that the batch has already are not made again, nor are old log-probs that the
        update itself will find.
        """
        metrics: Metrics = batch.meta_info.pop("metrics", {})
        calls = [] if has_column(batch, "token_level_scores") else [self.launch_rewards(batch)]
        if not self.policy_is_current(batch):
            calls.append(self.call("actor", "compute_log_prob", batch))
        if "ref" in self.groups:
            calls.append(self.call("ref", "compute_ref_log_prob", batch))
        if "critic" in self.groups:
            calls.append(self.call("critic", "compute_values", batch))
        for result in gather(*calls):
            metrics |= result.meta_info.pop("reward_metrics", {}) | reduce_metrics(
                result.meta_info.pop("metrics", {})
            )
            batch = batch.union(result)
        if has_column(batch, "old_log_probs"):
            metrics |= mismatch_metrics(batch)
        return batch, metrics

    def estimate(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Scores to rewards (less the KL, if that is asked for) to advantages and returns."""
        algorithm = self.config.algorithm
        metrics: Metrics = {}
        if algorithm.score_clip is not None:
            batch, metrics = clamp_scores(batch, algorithm.score_clip)
        if algorithm.use_kl_in_reward:
            batch, kl_metrics = apply_kl_penalty(batch, self.kl_ctrl, algorithm.kl_penalty)
            metrics |= kl_metrics
        else:
            write_columns(
                batch,
                token_level_rewards=read_columns(batch, "token_level_scores")["token_level_scores"],
            )
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
            calls.append(self.call("critic", "update_critic", batch))
        if self.global_step > self.config.trainer.critic_warmup:
            calls.append(self.call("actor", "update_actor", batch))
        metrics: Metrics = {}
        for result in gather(*calls):
            metrics |= reduce_metrics(result.meta_info["metrics"])
        return metrics

    def sync(self) -> Metrics:
        """The rollout gets the actor's weights as a new version, verified."""
        self.weight_version += 1
        bucket_mb = self.config.actor_rollout_ref.rollout.update_weights_bucket_megabytes
        return sync_weights(
            self.groups["actor"], self.groups["rollout"], self.weight_version, bucket_mb
        )

    def validate(self) -> Metrics:
        """Metrics of the whole validation set, if a validation is due after this step (0: before
        the first).
        """
        if not validation_is_due(self.config, self.global_step, self.loader.total_steps):
            return {}
        self.on_validate_begin()
        with self.clock("testing"):
            metrics = validation_metrics(self)
        metrics["timing_s/testing"] = self.timing["testing"]
        self.on_validate_end(metrics)
        return metrics

    def batch_metrics(self, batch: DataProto) -> Metrics:
        """What the step's samples look like, and how fast they were made."""
        num_devices = sum(plan.world_size for plan in self.groups.placement.pools.values())
        metrics = compute_data_metrics(batch, use_critic="critic" in self.groups)
        metrics |= compute_throughout_metrics(
            batch, {"step": sum(self.timing.values())}, num_devices
        )
        metrics |= {"training/global_step": self.global_step, "training/epoch": self.loader.epoch}
        return metrics | compute_timing_metrics(batch, call_seconds(self.calls) | self.timing)

    # ---------------------------------------------------------------------------------- checkpoints

    def save(self, is_last: bool = False) -> Metrics:
        """Write all roles and the driver, if a checkpoint is due after this step; `fit` commits it.

        Gives its time.
        """
        if not self.checkpoints.is_due(
            self.global_step, self.global_step if is_last else self.loader.total_steps
        ):
            return {}
        with self.clock("save_checkpoint"):
            self.checkpoints.write(self.global_step, self.groups, self.state_dict())
        return {"timing_s/save_checkpoint": self.timing["save_checkpoint"]}

    def resume(self) -> None:
        """Go on from the checkpoint that `trainer.resume_mode` chose, if there is one."""
        state = self.checkpoints.load(self.groups)
        if state is not None:
            self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """What the driver itself needs to go on, as JSON has it."""
        state = {
            "global_step": self.global_step,
            "weight_version": self.weight_version,
            "kl_coef": self.kl_ctrl.value,
        }
        return state | {"loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave; the sync that follows
        makes its weight version again.
        """
        self.global_step, self.weight_version = state["global_step"], state["weight_version"] - 1
        self.kl_ctrl.value = state["kl_coef"]
        self.loader.load_state_dict(state["loader"])

    # -------------------------------------------------------------------------------------- helpers

    def call(self, role: str, method: str, batch: DataProto) -> Any:
        """The future of a role's method, which gets the columns that it reads."""
        return getattr(self.groups[role], method).remote(self.needed(batch, role, method))

    def needed(self, batch: DataProto, role: str, method: str) -> DataProto:
        """The columns that the role's class says the method reads; a class that says nothing gets
        them all.
        """
        return select_reads(batch, self.groups[role].roles[role], method)

    def policy_is_current(self, batch: DataProto) -> bool:
        """Whether the update's own forward pass is the old log-probs, so that no pass need find
        them before.
        """
        own = old_log_probs_are_the_updates_own(self.config)
        return own and bool(
            (read_columns(batch, "policy_version")["policy_version"] == self.weight_version).all()
        )

    def take_calls(self) -> list[dict[str, Any]]:
        """The workers' calls since the last time, each with its stage and step."""
        calls, self.calls = self.calls, []
        return calls

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        """Wall time of a stage, as `timing_s/<stage>`; the calls that finished in it become the
        stage's.
        """
        began = time.perf_counter()
        try:
            yield
        finally:
            self.timing[stage] = time.perf_counter() - began
            self.calls += [
                call | {"stage": stage, "step": self.global_step}
                for call in self.groups.take_calls()
            ]
