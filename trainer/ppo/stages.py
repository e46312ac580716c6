"""PPO as a script: five stages. Read `PPOTrainer.step` first.

    prompts ─> rollout ─> { old log-probs ‖ reference ‖ teacher ‖ values ‖ rewards }
            ─> KL, advantages ─> { critic ‖ actor } ─> weight sync ─> next prompts

Calls separated by `‖` are futures: roles on different pools run at the same time, roles on one pool
take turns. Placement is configuration. The formulas of each stage are in the file with its name:
`sample`, `score`, `estimate`, `update`, `sync`, `validate`. The loop around a step is
`trainer.loop.Loop`. Observers of the step are in `trainer.observers`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer.config.devices import devices_of
from trainer.data.prompts import PromptLoader
from trainer.loop import Trainer
from trainer.observers.alarms import ALARM_RULES
from trainer.ppo import prepare, sample, score, sync, update, validate
from trainer.ppo.compute_advantage import check_columns, columns_read, compares_with_greedy
from trainer.ppo.config import PPOConfig
from trainer.ppo.dataflow import describe, overlaps, overridden_stages
from trainer.ppo.estimate import Estimation
from trainer.ppo.filters import active_filters
from trainer.ppo.memory import engine_rests, plan_text
from trainer.ppo.metrics import compute_data_metrics, speed
from trainer.ppo.roles import scorings_of
from trainer.ppo.sizes import batch_line, batch_table
from trainer.record import Metrics, Run
from trainer.rollouts.rollouts import (
    Rollouts,
    join_results,
    replaceable_roles,
    rollout_arguments,
)
from trainer.rollouts.samples import repeat_prompts
from trainer.run_folder.metrics import headline, reduce_metrics
from verl_like.batch.protocol import DataProto
from verl_like.calls.future import gather
from verl_like.calls.result import CallResult
from workers.rewards.weighted import Rewards

if TYPE_CHECKING:
    from trainer.data.lm_rows import LMRow
    from trainer.data.loader import RowLoader


class PPOTrainer(Trainer):
    """The stages of a step of PPO over the roles in `groups`.

    - `sample()` returns the batch of samples, and metrics
    - `score(batch)` returns it with rewards, log-probs and values, and metrics
    - `estimate(batch)` returns it with advantages, and metrics
    - `update(batch)` trains actor and critic, and returns metrics
    - `sync()` sends the actor's weights to the rollout, and returns metrics

    To change a stage, override its method in a subclass, and select the subclass by
    `trainer.cls=my_module.MyTrainer`. `trainer.hooks` lists the hooks in the order of their calls.
    """

    config: PPOConfig
    stages = ("gen", "score", "adv", "update", "update_weights")
    concurrent_stages = ("score", "update")
    repeatable_stages = ("score", "update_weights")
    call_labels = {
        "compute_log_prob": "old_log_prob",
        "compute_ref_log_prob": "ref",
        "compute_values": "values",
    }
    role = "actor"
    alarm_rules = ALARM_RULES
    learns_from_samples = True

    def __init__(
        self,
        run: Run,
        tokenizer: Any,
        loader: PromptLoader,
        rewards: Rewards,
        ptx: RowLoader[LMRow] | None = None,
    ) -> None:
        """Store the inputs; models are loaded when the loop starts."""
        super().__init__(run)
        weights = sync.RolloutWeights(self.config, self.groups)
        self.weights: sync.PolicyWeights = weights
        self.rollouts = Rollouts(self, tokenizer, rewards, send_weights=weights.send_again)
        self.loader, self.prompts = loader, iter(loader)
        self.ptx = ptx
        self.scorings = scorings_of(self.config)
        self.estimation = Estimation(self.config)
        self.entropy_ctrl = update.EntropyController(self.config.actor_rollout_ref.actor)

    def step(self) -> Metrics:
        """Sample, score, estimate advantages, update, and sync weights."""
        batch, sampled = self.stage("gen", self.sample)
        batch, scored = self.stage("score", self.score, batch)
        batch, estimated = self.stage("adv", self.estimate, batch)
        updated = self.stage("update", self.update, batch)
        synced = self.stage("update_weights", self.sync)
        return sampled | scored | estimated | updated | synced | speed(self, batch)

    # ---------------------------------------------------------------------------- 1. sample

    def sample(self) -> tuple[DataProto, Metrics]:
        """Return the samples of a step, sampled once or, with `filter_groups`, several times."""
        self.call_hook("on_sample_begin")
        filtered, metrics = self.config.algorithm.filter_groups, dict[str, float]()
        if filtered.enable:
            size = self.config.data.train_batch_size
            batch, drawn, metrics = sample.collect_groups(
                lambda attempt: self.rollouts.score(self.sample_prompts(attempt)), size, filtered
            )
            self.call_hook("on_filter", "algorithm.filter_groups", drawn, batch)
        else:
            batch = self.sample_prompts()
        batch, balanced = self.balance(batch)
        self.call_hook("on_sample_end", batch)
        return batch, metrics | balanced

    def sample_prompts(self, attempt: int = 0) -> DataProto:
        """Return samples of the next prompts; `attempt` counts the calls within a step from 0."""
        batch = self.generate(next(self.prompts), attempt)
        self.call_hook("on_generated", batch)
        return batch

    def generate(self, prompts: DataProto, attempt: int = 0) -> DataProto:
        """Return `rollout.n` samples of every prompt, each with its policy version."""
        num_samples = self.config.actor_rollout_ref.rollout.n
        batch = self.rollouts.generate(repeat_prompts(prompts, num_samples), attempt=attempt)
        if compares_with_greedy(self.config.algorithm.adv_estimator):
            limit = self.config.algorithm.score_clip
            baselines = sample.greedy_scores(self.rollouts, prompts, batch, limit)
            batch = batch.union(DataProto.from_dict({"reward_baselines": baselines}))
        return batch

    def balance(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Order the samples so that the actor's ranks get nearly equal numbers of tokens.

        Mini-batches keep their samples. With `actor.shuffle`, sample numbers are assigned before
        the reordering.
        """
        policy, critic = self.config.actor_rollout_ref, self.config.critic
        num_prompts = len(batch) // policy.rollout.n
        mini = policy.actor.ppo_mini_batch_size
        sizes = mini, critic.ppo_mini_batch_size or mini
        num_mini_batches = math.lcm(*(max(num_prompts // size, 1) for size in sizes))
        num_ranks = len(self.groups["actor"].update_actor.collecting_ranks())
        batch = sample.number_rows(batch, self.config)
        return sample.balance_ranks(batch, num_ranks, num_mini_batches)

    # ----------------------------------------------------------------------------- 2. score

    def score(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Launch all independent scoring calls on the samples, then join them.

        A column that the batch already has is not computed again. The metrics are those of the
        calls and, if there are old log-probs, of the gap between trainer and rollout.
        """
        config, groups, step = self.config, self.groups, self.global_step
        device_type = devices_of(config.trainer).type
        if "rollout" in groups and engine_rests(config, device_type):
            groups["rollout"].sleep()  # frees memory for other roles until `sync`

        has_scores = "token_level_scores" in batch.columns
        calls = [] if has_scores else [self.rollouts.launch_rewards(batch)]
        is_current = score.policy_is_current(batch, config, step, self.weights.version)
        wanted = columns_read(config.algorithm.adv_estimator)
        for reading in score.readings(self.scorings, config, is_current):
            if reading.role in groups and reading.column not in batch.columns:
                settings = {name: True for name in reading.writes[1:] if name in wanted}
                calls.append(self.call(reading.role, reading.method, batch, **settings))
        batch, metrics = join_results(batch, gather(*calls))

        if "old_log_probs" in batch.columns:
            metrics |= score.mismatch_metrics(batch) | score.reference_drift(batch, config, step)
        return batch, metrics

    # -------------------------------------------------------------------------- 3. estimate

    def estimate(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Turn scores into rewards (minus the KL, if configured) and advantages."""
        return self.estimation(batch)

    # ---------------------------------------------------------------------------- 4. update

    def update(self, batch: DataProto) -> Metrics:
        """Train critic and, after its warm-up, the actor on the filtered samples.

        On separate pools, they train at the same time.
        """
        config, step, metrics = self.config, self.global_step, dict[str, float]()
        num_prompts = len(batch) // config.actor_rollout_ref.rollout.n
        for name, chosen in active_filters(config).items():
            before, (batch, found) = batch, chosen.keep(batch, config, step)
            if chosen.resamples:
                batch, _ = self.balance(batch)
            metrics |= found
            self.call_hook("on_filter", name, before, batch)
        batch = update.add_chosen_tokens(batch, config, step)

        calls = []
        if "critic" in self.groups:
            calls.append(self.call("critic", "update_critic", batch))
        if step > config.trainer.critic_warmup:
            is_current = score.policy_is_current(batch, config, step, self.weights.version)
            on_policy = is_current and "old_log_probs" not in batch.columns
            settings = {"on_policy": on_policy, **self.entropy_ctrl.state_dict()}
            num_rows = update.rows_per_update(config, num_prompts)
            ptx = [] if self.ptx is None else [self.ptx.take(num_rows)]
            calls.append(self.call("actor", "update_actor", batch, *ptx, **settings))
        try:
            self.call_hook("on_update", batch)  # while the workers compute
        finally:
            results = gather(*calls)
        for result in results:
            metrics |= reduce_metrics(CallResult.of(result).metrics)
        return metrics | self.entropy_ctrl.update(metrics.get("actor/token_entropy", 0.0))

    # ------------------------------------------------------------------------------ 5. sync

    def sync(self) -> Metrics:
        """Send the actor's weights to the rollout, and to a reference that follows the actor."""
        synced = self.weights.send_next()
        return synced | sync.update_reference(self.config, self.groups, self.global_step)

    # --------------------------------------------------------------------------- validation

    @property
    def has_validation(self) -> bool:
        """True if there are `data.val_files`."""
        return bool(self.config.data.val_files)

    def validation_metrics(self) -> Metrics:
        """Sample all of `data.val_files`, write the samples to the run folder; return metrics."""
        prompts = self.loader.validation
        assert prompts is not None, "a validation is due only where there are val_files"
        actor, send = self.config.actor_rollout_ref.actor, self.weights.send_next
        with sync.averaged_weights(actor, self.groups["actor"], send):
            samples = validate.sample_all(prompts, self.rollouts)
        self.rollouts.write("validation", samples)
        return validate.name_metrics(samples)

    # ------------------------------------------------- called by the loop and the command

    @classmethod
    def describe(
        cls, config: PPOConfig, max_columns: int | None = None, brief: bool = False
    ) -> list[str]:
        """Return batch sizes, memory, and the graph of a step with the overrides of this class."""
        memory = plan_text(config, max_columns, brief=brief)
        if brief:
            return [memory, batch_line(config), overlaps(config)]
        graph = describe(config, max_columns, overridden_stages(cls))
        return [memory, batch_table(config, max_columns), graph]

    @classmethod
    def check_code(cls, config: PPOConfig, callbacks: Sequence[object]) -> None:
        """Check the user's code and, without a user's trainer or callbacks, the columns read."""
        super().check_code(config, callbacks)
        is_ours = cls.__module__.partition(".")[0] == "trainer"
        if is_ours and not callbacks:  # a user's stage or callback may write further columns
            check_columns(config)

    resolve_config = staticmethod(prepare.resolve_config)
    describe_inputs = staticmethod(prepare.describe_inputs)
    worker_code = staticmethod(prepare.worker_code)
    prepare = staticmethod(prepare.prepare)
    sample_metrics = staticmethod(compute_data_metrics)
    headline = staticmethod(headline)

    @property
    def total_steps(self) -> int:
        """Number of steps of the run, as configured or from the number of prompts."""
        return self.loader.total_steps

    def init_arguments(self, role: str) -> dict[str, Any]:
        """Tell actor and critic the number of steps, and the rollout if prompts have images."""
        if role == "critic":
            return {"total_steps": self.total_steps}
        if role == "actor":
            return {"total_steps": max(self.total_steps - self.config.trainer.critic_warmup, 1)}
        return rollout_arguments(self.groups, role, self.loader.has_images)

    def before_steps(self) -> None:
        """Send weights to the rollout before it generates."""
        self.weights.send_next()

    def replaceable_roles(self) -> frozenset[str]:
        """Return the roles that can be restarted during a step: rollout and unchanging models."""
        return replaceable_roles(self.config, self.groups)

    def state_dict(self) -> dict[str, Any]:
        """Return the driver's own state, ready for JSON."""
        return {
            "weight_version": self.weights.version,
            **self.estimation.state_dict(),
            **self.entropy_ctrl.state_dict(),
            "loader": self.loader.state_dict(),
            "ptx": None if self.ptx is None else self.ptx.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`; the next sync sends its weight version again."""
        self.weights.version = state["weight_version"] - 1
        self.estimation.load_state_dict(state)
        self.entropy_ctrl.load_state_dict(state)
        self.loader.load_state_dict(state["loader"])
        if self.ptx is not None and (rows := state.get("ptx")) is not None:
            self.ptx.load_state_dict(rows)
