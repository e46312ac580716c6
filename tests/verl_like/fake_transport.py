"""A transport without processes: any number of ranks run one after the other in this thread."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from tests.verl_like.sample_workers import Modes
from verl_like import WorkerGroup
from verl_like.calls.deadlines import Deadlines
from verl_like.calls.messages import Pending
from verl_like.calls.transport import Transport
from verl_like.process.host import WorkerHost
from verl_like.process.info import ProcessInfo


@dataclass(frozen=True, eq=False)
class Done:
    """A reference to an existing value."""

    value: Any


class FakeTransport(Transport):
    kind = "local"

    def __init__(self, constructors: Any, world_size: int) -> None:
        super().__init__(
            [ProcessInfo("+".join(constructors), r, world_size, r) for r in range(world_size)],
            Deadlines(),
        )
        self.hosts = [WorkerHost(constructors, process, {}) for process in self.processes]
        self.started = [host.start(None) for host in self.hosts]

    def construct_again(self) -> None:
        self.started = [host.construct_again() for host in self.hosts]

    def submit(self, rank: int, call: Any, parts: Any) -> Pending:
        isolated = copy.deepcopy(call)
        payload, header = self.hosts[rank].call(
            isolated, [p.value if isinstance(p, Done) else p for p in parts]
        )
        return Pending(rank, Done(payload), Done(header), call.role)

    def wait(self, references: Any, seconds: float) -> list[Any]:
        return list(references)

    def fetch(self, reference: Any) -> Any:
        return reference.value if isinstance(reference, Done) else reference.result()

    def stacks(self, seconds: float) -> dict[int, str]:
        return {}

    def place(self, rank: int) -> str:
        return "here"

    def shutdown(self) -> None:
        pass


def fake_group(world_size: int, cls: type = Modes, role: str = "modes") -> WorkerGroup:
    return WorkerGroup(FakeTransport({role: (cls, (), {})}, world_size), {role: cls}, prefixed=())
