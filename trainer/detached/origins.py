"""Where the samples of a detached run come from: their maker, and the age of their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from trainer.detached.samplers import Experience
from trainer.record import Metrics
from trainer.roadside.sample_log import SampleKey
from verl_like.batch.protocol import DataProto
from workers.columns import has_column, read_columns


class Origins:
    """Answers the observers' questions about a step's samples."""

    def __init__(self, num_trainers: int) -> None:
        """Rows of a batch go to so many trainer ranks, in equal chunks."""
        self._num_trainers = num_trainers
        self._maker_of: dict[str, int] = {}
        """Uid of a prompt -> the maker of its samples, for the batches of one round."""
        self.trained_by = 0
        """The version of the weights with which the present update began."""

    def begin_round(self) -> None:
        """Forget the batches of the round before."""
        self._maker_of = {}

    def add(self, experiences: Iterable[Experience]) -> None:
        """Note who made these."""
        self._maker_of |= {uid: one.maker for one in experiences for uid in one.uids}

    def rows_by_maker(self, batch: DataProto) -> dict[int, list[int]]:
        """Maker -> numbers of its rows."""
        rows: dict[int, list[int]] = {}
        for row, uid in enumerate(batch.non_tensor_batch["uid"]):
            rows.setdefault(self._maker_of[str(uid)], []).append(row)
        return dict(sorted(rows.items()))

    def facts(self, batch: DataProto) -> dict[SampleKey, dict[str, int]]:
        """For the sample log: the trainer rank of each sample, its version and its staleness."""
        uids, indices = batch.non_tensor_batch["uid"], batch.padded("sample_index").tolist()
        keys = [(str(uid), index) for uid, index in zip(uids, indices, strict=True)]
        rows = zip(keys, self._trainer_ranks(batch), self._versions(batch).tolist(), strict=True)
        return {
            key: {"trainers": rank, "versions": version, "staleness": self.trained_by - version}
            for key, rank, version in rows
        }

    def fields(self, batch: DataProto) -> dict[str, list[Any]]:
        """Further fields of `rollouts/N.jsonl`."""
        return {
            "maker": [self._maker_of.get(str(uid)) for uid in batch.non_tensor_batch["uid"]],
            "trainer": self._trainer_ranks(batch),
            "trained_by_version": [self.trained_by] * len(batch),
        }

    def metrics(self, batch: DataProto) -> Metrics:
        """How old the samples, and the values of makers' critics, are."""
        ages = self.trained_by - self._versions(batch)
        metrics = {
            f"detached/staleness/{age}": float(count)
            for age, count in Counter(ages.tolist()).items()
        }
        if has_column(batch, "value_version"):
            value_ages = self.trained_by - read_columns(batch, "value_version")["value_version"]
            metrics["detached/value_staleness/max"] = float(value_ages.max())
        return metrics | {
            "detached/staleness/mean": float(ages.float().mean()),
            "detached/staleness/max": float(ages.max()),
        }

    def _trainer_ranks(self, batch: DataProto) -> list[int]:
        size = -(-len(batch) // self._num_trainers)
        return [row // size for row in range(len(batch))]

    def _versions(self, batch: DataProto) -> Any:
        return read_columns(batch, "policy_version")["policy_version"]
