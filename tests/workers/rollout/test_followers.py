"""A call of an engine's first rank makes its other ranks follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tests.workers.prompts import prompt_batch
from verl_like.batch.protocol import DataProto
from workers.rollout.client import RolloutClient, Submission


class Group:
    """Two engines of two ranks; records the called ranks."""

    world_size = 4
    transport = SimpleNamespace(deadlines=SimpleNamespace(grace_s=1.0))

    def __init__(self) -> None:
        self.called: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        def remote_on(rank: int, *args: Any) -> Any:
            self.called.append((name, rank))
            found = args[0].select() if name == "generate_sequences" else [None]
            return SimpleNamespace(get=lambda *_, **__: found, lost_ranks=())

        return SimpleNamespace(remote_on=remote_on, collecting_ranks=lambda: [0, 2])


def rows() -> DataProto:
    return prompt_batch(4)


def test_each_call_of_a_first_rank_is_followed_by_one_of_each_other() -> None:
    group = Group()
    client = RolloutClient(group)
    client.generate(rows())
    assert sorted(group.called) == [
        *[("follow", rank) for rank in (1, 3)],
        *[("generate_sequences", rank) for rank in (0, 2)],
    ]
    group.called.clear()
    client.submit(Submission(rows()))
    client.take(seconds=torch.inf)
    assert sorted(group.called) == [
        *[("follow", rank) for rank in (1, 1, 3, 3)],
        *[(name, rank) for name in ("submit", "take") for rank in (0, 2)],
    ]
    assert client._following == []
