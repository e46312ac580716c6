"""The requests that the driver's side of a rollout group sends to its ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from verl_like.batch.protocol import DataProto
from verl_like.calls.deadlines import Deadlines
from workers.rollout.client import RolloutClient, Submission


class Echoing:
    """A group that returns its requested rows, and records them and the called ranks."""

    transport = SimpleNamespace(deadlines=Deadlines())

    def __init__(self, world_size: int, collecting_ranks: list[int]) -> None:
        self.world_size, self.ranks = world_size, collecting_ranks
        self.calls: list[tuple[str, int]] = []
        self.rows: dict[int, DataProto] = {}

    def __getattr__(self, name: str) -> Any:
        def remote_on(rank: int, *args: Any) -> Any:
            self.calls.append((name, rank))
            result: Any = None
            if name in ("generate_sequences", "submit"):
                result = self.rows[rank] = args[0]
            elif name == "collect":
                result = [self.rows[rank]]
            return SimpleNamespace(get=lambda timeout=None: result, lost_ranks=())

        return SimpleNamespace(remote_on=remote_on, collecting_ranks=lambda: self.ranks)


def test_the_chunks_of_a_batch_are_not_copied() -> None:
    group, rows = Echoing(2, [0, 1]), DataProto.from_dict({"x": torch.arange(10).view(5, 2)})
    samples = RolloutClient(group).generate(rows)
    assert torch.equal(samples.padded("x"), rows.padded("x"))
    assert [len(chunk) for chunk in group.rows.values()] == [3, 2]
    for chunk in group.rows.values():
        storages = [data.padded("x").untyped_storage().data_ptr() for data in (chunk, rows)]
        assert len(set(storages)) == 1


def test_submissions_that_begin_together_are_returned_whole() -> None:
    group, chunks = Echoing(2, [0, 1]), [torch.arange(3), torch.arange(3, 6)]
    client = RolloutClient(group)
    submissions = [Submission(DataProto.from_dict({"x": chunk[:, None]})) for chunk in chunks]
    client.submit(*submissions)
    requests = [rows.padded("x").flatten().tolist() for rows in group.rows.values()]
    assert requests == [chunk.tolist() for chunk in chunks]
    assert client.collect() == submissions
    for submission, chunk in zip(submissions, chunks, strict=True):
        assert torch.equal(submission.samples().padded("x")[:, 0], chunk)


def test_the_other_ranks_of_an_engine_follow_each_call_of_its_first() -> None:
    group, rows = Echoing(4, [0, 2]), DataProto.from_dict({"x": torch.arange(8).view(4, 2)})
    client = RolloutClient(group)
    client.generate(rows)
    followed = [("follow", rank) for rank in (1, 3)]
    assert sorted(group.calls) == followed + [("generate_sequences", rank) for rank in (0, 2)]
    group.calls.clear()
    client.submit(Submission(rows))
    client.collect(seconds=torch.inf)
    leading = [(name, rank) for name in ("submit", "collect") for rank in (0, 2)]
    assert sorted(group.calls) == sorted(2 * followed + leading)
    assert client._following == []
