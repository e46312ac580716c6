"""The actor that a worker process is on Ray: a `WorkerHost` behind Ray's method calls."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray

from verl_like.errors import WorkerError
from verl_like.host import HostFacts, WorkerHost
from verl_like.transport import Call, Header

OWN_PACKAGES = ("verl_like", "workers", "trainer")


class RayHost:
    """The actor class. Stacks are answered by a thread of their own, everything else in turn."""

    def __init__(self, recipes: bytes, facts: HostFacts) -> None:
        """The roles come pickled: what they import must be ours, even where the driver's folder holds namesakes."""
        prefer_own_packages()
        import torch

        torch.set_num_threads(1)
        self._host = WorkerHost(recipes, facts)

    def open_store(self, port: int) -> tuple[str, int] | WorkerError:
        """Bind the rendezvous store on this node; an error goes to `start` as a value, which tells the driver."""
        try:
            return self._host.open_store(ray.util.get_node_ip_address(), port)
        except WorkerError as error:
            return error

    @ray.method(num_returns=2)
    def start(self, master: tuple[str, int] | WorkerError) -> tuple[str, Header]:
        """Construct the roles; says on which node."""
        return ray.get_runtime_context().get_node_id(), self._host.start(master)

    @ray.method(num_returns=2)
    def call(self, call: Call | str, *parts: Any) -> tuple[Any, Header]:
        """Run one method: payload and header. Role and method on two lines are a call without arguments."""
        if isinstance(call, str):
            role, method = call.split("\n")
            call = Call(role, method)
        return self._host.call(call, parts)

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        """What the process is doing, asked past the queue of calls."""
        return self._host.stacks()


HostActor = ray.remote(concurrency_groups={"control": 1})(RayHost)  # type: ignore[call-overload]


def prefer_own_packages() -> None:
    """Move folders with namesakes of our packages behind our own on the import path: Ray puts the driver's first."""
    root = str(Path(__file__).resolve().parents[2])
    others = [
        p for p in sys.path if p != root and any((Path(p) / f).exists() for n in OWN_PACKAGES for f in (n, f"{n}.py"))
    ]
    if others:
        sys.path[:] = [p for p in sys.path if p not in others and p != root] + [root, *others]
