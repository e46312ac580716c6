"""Generate and score samples, for PPO and evaluation.

Example:

    batch = rollouts.generate(prompts)                # a response for every row
    batch, metrics = rollouts.score(batch)            # token_level_scores, and metrics
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from trainer.groups.worker_groups import WorkerGroups
from trainer.loop import Trainer
from trainer.rollouts.samples import thin_old_samples, thin_samples, write_samples
from trainer.run_folder.metrics import reduce_metrics
from trainer.run_state import Metrics
from verl_like.batch.protocol import DataProto
from verl_like.calls.result import CallResult
from workers.columns import read_column, rm_column, select_reads
from workers.config import has_environment, model_rewards
from workers.rewards.manager import RESPONSE_TEXT
from workers.rewards.weighted import Rewards, WeightedScores
from workers.roles.rollout import RolloutWorker

PROMPT_COLUMNS = ["input_ids", "attention_mask", "position_ids"]


class Rollouts:
    """The role `rollout` of a run, and the rewards that score its samples."""

    def __init__(
        self,
        trainer: Trainer,
        tokenizer: Any,
        rewards: Rewards,
        ask: Callable[[DataProto], DataProto] | None = None,
        model_role: Callable[[str], str] = lambda role: role,
    ) -> None:
        """`ask` generates the samples of rows; by default, the group of the role `rollout` does.

        `model_role` maps a reward model's role to the role that scores in its place.
        """
        self.trainer, self.run = trainer, trainer.run
        self.config: Any = trainer.config
        self.tokenizer, self.rewards = tokenizer, rewards
        self._ask, self._model_role = ask, model_role

    def generate(self, batch: DataProto, **settings: Any) -> DataProto:
        """Return the prompt rows with one response each; `settings` override the batch's own."""
        prompts = self.prompt_columns(batch, "rollout")
        prompts.meta_info = prompts.meta_info | settings
        ask = self._ask or self.trainer.recovery.generate
        samples = ask(prompts)
        stage = "testing" if settings.get("validate") else "sample"
        self.note_environments(samples, "rollout", stage)
        return with_responses(batch, samples)

    def prompt_columns(self, batch: DataProto, role: str) -> DataProto:
        """Return the columns that a rollout reads; environments also get the data row's columns."""
        columns = select_reads(batch, self.run.groups[role].roles[role], "generate_sequences")
        if has_environment(self.config):
            from workers.agents.players import ROW_COLUMNS

            rows = [name for name in ROW_COLUMNS if name in batch.non_tensor_batch]
            columns = columns.select().union(batch.select([], rows))
        return columns

    def note_environments(self, samples: DataProto, role: str, stage: str) -> None:
        """Add the time in which trajectories waited for environments to the timeline."""
        if has_environment(self.config):
            from trainer.rollouts.turns import waits_for_environments

            pool = self.run.groups.placement.role_mapping[role]
            where = {"pool": pool, "stage": stage, "step": self.run.step}
            self.run.calls += [call | where for call in waits_for_environments(samples)]

    def score(self, batch: DataProto, normalize: bool = True) -> tuple[DataProto, Metrics]:
        """Score the batch and wait for the scores; return the batch with them, and metrics."""
        return join_results(batch, [self.launch_rewards(batch, normalize).get()])

    def launch_rewards(self, batch: DataProto, normalize: bool = True) -> WeightedScores:
        """Start all rewards; return a future of `token_level_scores`, a weighted sum."""
        roles = {reward.name: role for role, reward in model_rewards(self.config).items()}
        check = self.run.groups.check_idle
        return self.rewards.launch(
            batch, lambda reward: self._ask_model(roles[reward.name], batch), normalize, check
        )

    def _ask_model(self, role: str, batch: DataProto) -> Any:
        """Return a future of a reward model's scores; if the batch has them, skip the call."""
        if rm_column(role) in batch.columns:
            return ScoresInBatch(batch, role)
        return self.trainer.call(self._model_role(role), "compute_rm_score", batch)

    def write(
        self, name: str, batch: DataProto, fields: dict[str, list[Any]] | None = None
    ) -> None:
        """Write this step's samples as text to the folder `name`; thin out files of old steps."""
        folder, step = self.run.folder / name, self.run.step
        columns = self.rewards.columns_read(batch)
        if any(columns):
            fields = {"columns": columns, **(fields or {})}
        write_samples(folder, step, batch, self.tokenizer, fields)
        num_whole = getattr(self.config.trainer, "rollout_steps_to_keep", None)
        if num_whole is None:
            return
        if name == "rollouts":  # each step makes one older file old
            thin_samples(folder / f"{step - num_whole}.jsonl")
        else:
            thin_old_samples(folder, step - num_whole)


class ScoresInBatch:
    """A future of a reward model's scores that the batch already contains."""

    def __init__(self, batch: DataProto, role: str) -> None:
        self._scores = read_column(batch, rm_column(role))

    def done(self) -> bool:
        return True

    def get(self, timeout: float | None = None) -> DataProto:
        """Return the scores as a batch, like `compute_rm_score`."""
        return DataProto.from_dict({"rm_scores": self._scores})


def replaceable_roles(config: Any, groups: WorkerGroups) -> frozenset[str]:
    """Return the roles that can be restarted: rollouts, and roles whose weights do not change.

    A rollout's class must be `RolloutWorker` itself. Other classes declare `is_frozen`. A
    subclass must declare it again, because it may have more state.
    """
    replaceable = set()
    for role in groups:
        cls = groups[role].roles[role]
        if cls is RolloutWorker or vars(cls).get("is_frozen", False):
            replaceable.add(role)
    if "ref" in replaceable and config.actor_rollout_ref.ref.update_every is not None:
        # the reference lags behind the actor, so no other role has its weights
        replaceable.discard("ref")
    return frozenset(replaceable)


def rollout_arguments(groups: WorkerGroups, role: str, has_images: bool) -> dict[str, Any]:
    """Return the arguments of `init_model` if the role is a rollout whose prompts have images."""
    reads_images = has_images and issubclass(groups[role].roles[role], RolloutWorker)
    return {"reads_images": True} if reads_images else {}


def with_responses(batch: DataProto, samples: DataProto) -> DataProto:
    """Combine prompt rows with the rollout's samples."""
    of_samples = {*samples.columns, *samples.non_tensor_batch}
    of_others = {*PROMPT_COLUMNS, *of_samples, RESPONSE_TEXT, "finish_reason"}
    others = batch.select(
        [name for name in batch.columns if name not in of_others],
        [name for name in batch.non_tensor_batch if name not in of_others],
    )
    return others.union(samples.select(meta_info_keys=()))


def join_results(batch: DataProto, results: Iterable[Any]) -> tuple[DataProto, Metrics]:
    """Add the columns that calls returned to the batch; also reduce each metric to one number."""
    batch, results = batch.select(), list(results)
    for result in map(CallResult.of, results):
        if result.batch is not None:
            batch = batch.union(result.batch)
    return batch, call_metrics(results)


def call_metrics(results: Iterable[Any]) -> Metrics:
    """Return the metrics of calls, each reduced to one number."""
    metrics: Metrics = {}
    for result in map(CallResult.of, results):
        metrics |= reduce_metrics(result.metrics)
    return metrics
