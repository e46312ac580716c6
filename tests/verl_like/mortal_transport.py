"""Ranks without processes that die or respond late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.verl_like.fake_transport import Done, FakeTransport
from verl_like import WorkerGroup
from verl_like.calls.messages import Pending
from verl_like.errors import WorkerDiedError

NEVER = 1_000_000


class Mortal(FakeTransport):
    """Counts the driver's waits, after which ranks respond or die."""

    def __init__(self, constructors: dict[str, Any], world_size: int) -> None:
        super().__init__(constructors, world_size)
        self.dead: dict[int, int] = {}
        """Rank -> the number of waits after which it has died; it never responds."""
        self.slow: dict[int, int] = {}
        """Rank -> the number of waits after which it has responded."""
        self.payloads_lost: set[int] = set()
        self.num_waits = 0

    def submit(self, rank: int, call: Any, parts: Any) -> Pending:
        if rank in self.dead:
            lost = Done(SimpleNamespace(rank=rank))
            return Pending(rank, lost, lost, call.role)
        pending = super().submit(rank, call, parts)
        payload = Done(WorkerDiedError("gone")) if rank in self.payloads_lost else pending.payload
        header = Done(pending.header.value)
        return Pending(rank, payload, header, call.role)

    def wait(self, references: Any, seconds: float) -> list[Any]:
        self.num_waits += 1
        return [r for r in references if self._has_responded(r.value.rank)]

    def fetch_together(self, references: Any, seconds: float) -> None:
        """Ranks respond one by one."""

    def _has_responded(self, rank: int) -> bool:
        return rank not in self.dead and self.num_waits > self.slow.get(rank, 0)

    def lost(self, ranks: Any) -> dict[int, str]:
        return {rank: "gone" for rank in ranks if self.dead.get(rank, NEVER) <= self.num_waits}

    def fetch(self, reference: Any) -> Any:
        value = super().fetch(reference)
        if isinstance(value, Exception):
            raise value
        return value


def mortal_group(world_size: int, cls: type, *args: Any, **kwargs: Any) -> Any:
    """Return a group of one role; `group.transport.dead` and `slow` change its ranks."""
    transport = Mortal({"role": (cls, args, kwargs)}, world_size)
    return WorkerGroup(transport, {"role": cls}, prefixed=())
