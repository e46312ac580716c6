"""Samples with their scores: what PPO and the recipes that only sample have in common.

batch = self.roll_out(prompts)                # a response for every row
batch, metrics = self.with_rewards(batch)     # token_level_scores, and what the rewards logged
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from trainer.groups.worker_groups import WorkerGroups
from trainer.loop import Metrics, Trainer
from trainer.rollouts.headline import headline
from trainer.rollouts.samples import write_samples
from trainer.rollouts.turns import waits_for_environments
from trainer.run_folder.metrics import reduce_metrics
from verl_like.batch.protocol import DataProto
from verl_like.calls.result import Result
from verl_like.errors import LostSamplesError
from workers.agents.players import ROW_COLUMNS
from workers.columns import select_reads
from workers.config import model_rewards, plays
from workers.rewards.manager import RESPONSE_TEXT
from workers.rewards.weighted import Rewards, WeightedScores
from workers.roles.rollout import RolloutWorker
from workers.rollout.batches import goes_on
from workers.rollout.client import RolloutClient, Submission

ASK = "rollout", "generate_sequences"
PROMPT_COLUMNS = ["input_ids", "attention_mask", "position_ids"]


class SamplingTrainer(Trainer):
    """Drives a role `rollout`, and scores what it says."""

    config: Any

    def __init__(self, config: Any, groups: WorkerGroups, tokenizer: Any, rewards: Rewards) -> None:
        super().__init__(config, groups)
        self.tokenizer = tokenizer
        self.rewards = rewards

    @classmethod
    def worker_code(cls, config: Any) -> list[str]:
        """Worker classes, and the rollout engine."""
        return [*super().worker_code(config), config.actor_rollout_ref.rollout.name]

    @classmethod
    def headline(cls, metrics: Mapping[str, float]) -> Sequence[str]:
        """Reward, KL, entropy and the like, as far as a recipe has them."""
        return list(headline(metrics))

    def roll_out(self, batch: DataProto, **settings: Any) -> DataProto:
        """The rows of prompts with a response each; `settings` go before those of the batch.

        Rows with the finish reason "abort" go on where they ended.
        """
        asked = batch.select() if goes_on(batch) else self.needed(batch, *ASK)
        asked.meta_info = asked.meta_info | settings
        samples = self.ask_rollout(asked)
        self.note_environments(samples, "rollout", "testing" if settings.get("validate") else "gen")
        return with_responses(batch, samples)

    def note_environments(self, samples: DataProto, role: str, stage: str) -> None:
        """When trajectories of this rollout waited for environments, for the timeline."""
        if plays(self.config):
            pool = self.groups.placement.role_mapping[role]
            where = {"pool": pool, "stage": stage, "step": self.global_step}
            self.calls += [call | where for call in waits_for_environments(samples)]

    def ask_rollout(self, asked: DataProto) -> DataProto:
        """The rollout's samples of these rows.

        If it loses a process meanwhile and can be replaced, the samples that the process had not
        finished are generated again from their prompts.
        """
        replace = self.replace_rollout if self.can_replace("rollout") else None
        return RolloutClient(self.groups["rollout"]).generate(asked, replace)

    def replace_rollout(self, error: LostSamplesError, submission: Submission) -> Any:
        """The rollout's group that comes in the place of a lost one, with the weights of now."""
        self.replace_lost(error)
        self.send_weights()
        missing = len(submission.missing)
        self.restarts.note_samples(self.global_step, submission.num_samples, missing)
        return self.groups["rollout"]

    def send_weights(self) -> Metrics:
        """Bring the rollout the weights that it is to have, which its model's folder has here."""
        return {}

    def with_rewards(self, batch: DataProto, normalize: bool = True) -> tuple[DataProto, Metrics]:
        """The batch with its scores, waited for: for what must see them before the score stage."""
        return join_results(batch, [self.launch_rewards(batch, normalize).get()])

    def launch_rewards(self, batch: DataProto, normalize: bool = True) -> WeightedScores:
        """The future of `token_level_scores`: all rewards at the same time, added up by weight."""
        calls = {
            reward.name: partial(self.call, role, "compute_rm_score")
            for role, reward in model_rewards(self.config).items()
        }
        check = self.groups.check_idle
        return self.rewards.launch(
            batch, lambda reward: calls[reward.name](batch), normalize, check
        )

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
        """The columns that the role's class says the method reads; all, if it says nothing.

        Environments begin with columns of the data's row.
        """
        found = select_reads(batch, self.groups[role].roles[role], method)
        if method == ASK[1] and plays(self.config):
            rows = [name for name in ROW_COLUMNS if name in batch.non_tensor_batch]
            found = found.select().union(batch.select([], rows))
        return found

    def replaceable_roles(self) -> frozenset[str]:
        """Rollout, reward models, and other readers of what does not move."""
        return replaceable_roles(self.config, self.groups)

    def write_samples(self, name: str, batch: DataProto) -> None:
        """The samples of this step as text, in a folder of that name."""
        more = self.sample_fields(batch) if name == "rollouts" else None
        write_samples(self.folder / name, self.global_step, batch, self.tokenizer, more)

    def sample_fields(self, batch: DataProto) -> dict[str, list[Any]]:
        """What this recipe's files of samples say beside: field -> a value for every row."""
        return {}


def replaceable_roles(config: Any, groups: WorkerGroups) -> frozenset[str]:
    """Rollouts, and classes that say of themselves that their weights do not move (`is_frozen`).

    A subclass says it again: it may keep more.
    """
    found = set()
    for role in groups:
        cls = groups[role].roles[role]
        if cls is RolloutWorker or vars(cls).get("is_frozen", False):
            found.add(role)
    if "ref" in found and config.actor_rollout_ref.ref.update_every is not None:
        found.discard("ref")  # it follows the actor from afar, and no other has its weights
    return frozenset(found)


def with_responses(batch: DataProto, samples: DataProto) -> DataProto:
    """The rows of prompts with what the rollout made of them."""
    of_others = {*PROMPT_COLUMNS, *samples.columns, RESPONSE_TEXT, "finish_reason"}
    kept = batch.select(
        [name for name in batch.columns if name not in of_others],
        [name for name in batch.non_tensor_batch if name not in of_others],
    )
    return kept.union(samples.select(meta_info_keys=()))


def join_results(batch: DataProto, results: Iterable[Any]) -> tuple[DataProto, Metrics]:
    """A batch that has the columns which calls returned, too; and one number for each metric."""
    batch = batch.select()
    metrics: Metrics = {}
    for result in map(Result.of, results):
        metrics |= reduce_metrics(result.metrics)
        if result.batch is not None:
            batch = batch.union(result.batch)
    return batch, metrics
