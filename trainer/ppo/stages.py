"""PPO as a script: five stages. Read `PPOTrainer.step` first.

    prompts ─> rollout ─> { old log-probs ‖ reference ‖ teacher ‖ values ‖ rewards }
            ─> KL, advantages ─> { critic ‖ actor } ─> weight sync ─> next prompts

Calls separated by `‖` are futures: roles on different pools run at the same time, roles on one pool
take turns. Placement is configuration. The formulas of the stages are in `sampling`, `scoring` (and
the advantages), `updating` and `weight_sync`, and those of a validation in `validation`. The loop
around a step is `trainer.loop.Loop`. Observers of the step are in `trainer.observers`.
"""

from __future__ import annotations

from typing import Any

from trainer.data.loader import RowLoader
from trainer.data.prompts import PromptLoader
from trainer.loop import Trainer
from trainer.ppo import preparation, sampling, scoring, updating, weight_sync
from trainer.ppo.config import PPOConfig
from trainer.ppo.filters import active_filters
from trainer.ppo.metrics import speed
from trainer.ppo.scoring import Estimation
from trainer.rollouts import rollouts, samples
from trainer.run_state import Metrics, Run
from verl_like.batch.protocol import DataProto
from verl_like.calls.future import gather
from workers.rewards.weighted import Rewards


class PPOTrainer(Trainer):
    """The stages of a step of PPO over the roles in `groups`.

    - `sample()` returns the batch of samples, and metrics
    - `score(batch)` returns it with rewards, log-probs and values, and metrics
    - `estimate(batch)` returns it with advantages, and metrics
    - `update(batch)` trains actor and critic, and returns metrics
    - `sync()` sends the actor's weights to the rollout, and returns metrics

    To change a stage, override its method, and set `trainer.cls=my_module.Bounded`:

        class Bounded(PPOTrainer):
            def estimate(self, batch):
                batch, metrics = super().estimate(batch)
                return write_columns(batch, advantages=batch.padded("advantages").tanh()), metrics

    `trainer.hooks` lists the hooks in the order of their calls.
    """

    recipe = preparation.PPO_RUN
    config: PPOConfig

    def step(self) -> Metrics:
        """Sample, score, estimate advantages, update, and sync weights."""
        batch, sampled = self.stage("sample", self.sample)
        batch, scored = self.stage("score", self.score, batch)
        batch, estimated = self.stage("estimate", self.estimate, batch)
        updated = self.stage("update", self.update, batch)
        synced = self.stage("sync", self.sync)
        return sampled | scored | estimated | updated | synced | speed(self, batch)

    # ---------------------------------------------------------------------------- 1. sample

    def sample(self) -> tuple[DataProto, Metrics]:
        """Return the samples of a step, sampled once or, with `filter_groups`, several times."""
        self.call_hook("on_sample_begin")
        filtered, metrics = self.config.algorithm.filter_groups, dict[str, float]()
        if filtered.enable:
            size = self.config.data.train_batch_size
            batch, drawn, metrics = sampling.collect_groups(
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
        """Return `rollout.n` samples of each of the `prompts`, with their policy versions.

        A sample's seed depends on `attempt`, so a repeated generation returns other samples.
        """
        num_samples = self.config.actor_rollout_ref.rollout.n
        rows = samples.repeat_prompts(prompts, num_samples)
        batch = self.rollouts.generate(rows, attempt=attempt)
        return sampling.with_baselines(batch, self.rollouts, prompts, self.config.algorithm)

    def balance(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Order the samples so that the actor's ranks get nearly equal numbers of tokens.

        Mini-batches keep their samples. With `actor.shuffle`, sample numbers are assigned before
        the reordering.
        """
        num_ranks = len(self.groups["actor"].update_actor.collecting_ranks())
        num_mini_batches = sampling.num_mini_batches(self.config, len(batch))
        batch = sampling.number_rows(batch, self.config)
        return sampling.balance_ranks(batch, num_ranks, num_mini_batches)

    # ----------------------------------------------------------------------------- 2. score

    def score(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Launch all independent scoring calls on the samples, then join them.

        A column that the batch already has is not computed again. The metrics are those of the
        calls and, if there are old log-probs, of the gap between trainer and rollout.
        """
        config, step = self.config, self.global_step
        self.weights.sleep_if_needed()
        has_scores = "token_level_scores" in batch.columns
        calls = [] if has_scores else [self.rollouts.launch_rewards(batch)]
        in_update = scoring.update_computes_old_log_probs(batch, config, step, self.weights.version)
        for call in scoring.needed_scoring_calls(config, in_update):
            if call.role in self.groups and call.column not in batch.columns:
                settings = scoring.column_settings(call, config)
                calls.append(self.call(call.role, call.method, batch, **settings))
        batch, metrics = rollouts.join_results(batch, gather(*calls))

        if "old_log_probs" in batch.columns:
            metrics |= scoring.mismatch_metrics(batch)
            metrics |= scoring.reference_drift(batch, config, step)
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
        for name, sample_filter in active_filters(config).items():
            before = batch
            batch, filtered = sample_filter.apply(before, config, step)
            if sample_filter.resamples:
                batch, _ = self.balance(batch)
            metrics |= filtered
            self.call_hook("on_filter", name, before, batch)
        batch = updating.add_chosen_tokens(batch, config, step)

        calls = []
        if "critic" in self.groups:
            calls.append(self.call("critic", "update_critic", batch))
        if step > config.trainer.critic_warmup:
            in_update = scoring.update_computes_old_log_probs(
                batch, config, step, self.weights.version
            )
            on_policy = in_update and "old_log_probs" not in batch.columns
            settings = {"on_policy": on_policy, **self.entropy_ctrl.state_dict()}
            num_rows = updating.rows_per_update(config, num_prompts)
            ptx = [] if self.ptx is None else [self.ptx.next_batch(num_rows)]
            calls.append(self.call("actor", "update_actor", batch, *ptx, **settings))
        try:
            self.call_hook("on_update", batch)  # while the workers compute
        finally:
            results = gather(*calls)
        metrics |= rollouts.call_metrics(results)
        return metrics | self.entropy_ctrl.update(metrics.get("actor/token_entropy", 0.0))

    # ------------------------------------------------------------------------------ 5. sync

    def sync(self) -> Metrics:
        """Send the actor's weights to the rollout, and to a reference that follows the actor."""
        synced = self.weights.send_next()
        return synced | weight_sync.update_reference(self.config, self.groups, self.global_step)

    # --------------------------------------------------------------------------- validation

    def validation_metrics(self) -> Metrics:
        """Sample all of `data.val_files`, write the samples to the run folder; return metrics."""
        from trainer.ppo import validation  # without val_files, no run needs it

        prompts = self.loader.validation
        assert prompts is not None, "a validation is due only where there are val_files"
        actor, send = self.config.actor_rollout_ref.actor, self.weights.send_next
        with weight_sync.averaged_weights(actor, self.groups["actor"], send):
            batch = validation.sample_all(prompts, self.rollouts)
        self.rollouts.write("validation", batch)
        return validation.name_metrics(batch)

    # ------------------------------------------------------------- called by the loop

    def __init__(
        self,
        run: Run,
        tokenizer: Any,
        loader: PromptLoader,
        rewards: Rewards,
        ptx: RowLoader[Any] | None = None,
    ) -> None:
        """Store the inputs; models are loaded when the loop starts."""
        config: Any = run.config
        weights = weight_sync.RolloutWeights(config, run.groups)
        super().__init__(run, weights.send_again)
        self.weights: weight_sync.PolicyWeights = weights
        self.rollouts = rollouts.Rollouts(self, tokenizer, rewards)
        self.loader, self.prompts = loader, iter(loader)
        self.ptx = ptx
        self.has_validation = bool(self.config.data.val_files)
        self.estimation = Estimation(self.config)
        self.entropy_ctrl = updating.EntropyController(self.config.actor_rollout_ref.actor)

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
        return rollouts.rollout_arguments(self.groups, role, self.loader.has_images)

    def before_steps(self) -> None:
        """Send weights to the rollout before it generates."""
        self.weights.send_next()

    def replaceable_roles(self) -> frozenset[str]:
        """Return the roles that can be restarted during a step: rollout and unchanging models."""
        return rollouts.replaceable_roles(self.config, self.groups)

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
