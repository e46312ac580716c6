"""The requests that the driver's side of a rollout group sends to its ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from verl_like.batch.protocol import DataProto
from verl_like.calls.diagnose import Deadlines
from workers.rollout.client import RolloutClient, Submission


class Echoing:
    """A group of two whose ranks return their requested rows."""

    transport = SimpleNamespace(deadlines=Deadlines())
    world_size = 2

    def __init__(self) -> None:
        self.asked: dict[int, DataProto] = {}
        self.generate_sequences = self
        self.submit = self
        self.take = SimpleNamespace(remote_on=lambda rank, *_: self.given(rank))

    def given(self, rank: int) -> Any:
        """Return all requests of a rank."""
        rows = self.asked.pop(rank)
        return SimpleNamespace(get=lambda timeout=None: [rows], lost_ranks=[])

    def collecting_ranks(self) -> list[int]:
        return [0, 1]

    def remote_on(self, rank: int, rows: DataProto) -> Any:
        self.asked[rank] = rows
        return SimpleNamespace(get=lambda timeout=None: rows)


def test_a_ranks_share_of_a_batch_is_not_copied() -> None:
    group, rows = Echoing(), DataProto.from_dict({"x": torch.arange(10).view(5, 2)})
    samples = RolloutClient(group).generate(rows)
    assert torch.equal(samples.padded("x"), rows.padded("x"))
    assert [len(asked) for asked in group.asked.values()] == [3, 2]
    for asked in group.asked.values():
        storages = [data.padded("x").untyped_storage().data_ptr() for data in (asked, rows)]
        assert len(set(storages)) == 1


def test_submissions_that_begin_together_are_few_on_each_rank_and_come_back_whole() -> None:
    group, chunks = Echoing(), [torch.arange(3), torch.arange(3, 6)]
    client = RolloutClient(group)
    submissions = [Submission(DataProto.from_dict({"x": chunk[:, None]})) for chunk in chunks]
    client.submit(*submissions)
    asked = [rows.padded("x").flatten().tolist() for rows in group.asked.values()]
    assert asked == [chunk.tolist() for chunk in chunks]
    assert client.take() == submissions
    for submission, chunk in zip(submissions, chunks, strict=True):
        assert torch.equal(submission.samples().padded("x")[:, 0], chunk)
