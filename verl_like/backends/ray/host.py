"""The actor that a worker process is on Ray: a `WorkerHost` behind Ray's method calls."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from verl_like.backends.ray import side_channel
from verl_like.backends.ray.line_end import LineEnd
from verl_like.calls.transport import Call
from verl_like.errors import WorkerError
from verl_like.process.host import HostFacts, WorkerHost

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
NOTHING: Arguments = (), {}
OWN_PACKAGES = ("verl_like", "workers", "trainer")


@dataclass(frozen=True)
class Home:
    """Where a worker process lives."""

    node: str
    door: side_channel.Door


class RayHost:
    """The actor class.

    Calls run in turn, in the main thread: threads of Ray's own would slow down every one.
    """

    def __init__(self, recipes: bytes, facts: HostFacts) -> None:
        """The roles come pickled: what they import must be ours, even where the driver's folder
        holds namesakes.
        """
        prefer_own_packages()
        import torch

        torch.set_num_threads(1)
        self._host = WorkerHost(recipes, facts)
        self._line = LineEnd(self._host.call)

    def home(self) -> Home:
        """Which node this is, and the door that answers from now on."""
        visits = {
            side_channel.STACKS: side_channel.tell(self._host.stacks),
            side_channel.LINE: self._line.welcome,
        }
        visits[side_channel.PAST_QUEUE] = self._line.past_queue
        return Home(
            ray.get_runtime_context().get_node_id(),
            side_channel.answer(ray.util.get_node_ip_address(), visits),
        )

    def open_store(self, port: int) -> tuple[str, int] | WorkerError:
        """Bind the rendezvous store on this node; an error goes to `start` as a value, which tells
        the driver.
        """
        try:
            return self._host.open_store(ray.util.get_node_ip_address(), port)
        except WorkerError as error:
            return error

    def start(self, master: tuple[str, int] | WorkerError) -> bytes:
        """Construct the roles."""
        return self._host.start(master).packed()

    @ray.method(num_returns=2)
    def call(self, arguments: Arguments = NOTHING, *parts: Any) -> tuple[Any, bytes]:
        """Run one method: payload and header. The task's name says which: `<role>.<method>`."""
        payload, header = self._host.call(_named_call(arguments), parts)
        return payload, header.packed()

    def call_silent(self, arguments: Arguments = NOTHING, *parts: Any) -> bytes:
        """Run one method that returns None: each result that Ray carries has its price."""
        return self._host.call(_named_call(arguments, silent=True), parts)[1].packed()

    def attend(self, stay: int) -> Any:
        """Answer small calls at the line until told to leave; what this returns is a result too
        large for the line.
        """
        return self._line.attend(stay)


HostActor = ray.remote(RayHost)


def _named_call(arguments: Arguments, silent: bool = False) -> Call:
    role, _, method = (ray.get_runtime_context().get_task_name() or "").rpartition(".")
    return Call(role, method, *arguments, silent=silent)


def prefer_own_packages() -> None:
    """Move folders with namesakes of our packages behind our own on the import path:

    Ray puts the driver's first.
    """
    root = str(Path(__file__).resolve().parents[3])
    others = [
        p
        for p in sys.path
        if p != root and any((Path(p) / f).exists() for n in OWN_PACKAGES for f in (n, f"{n}.py"))
    ]
    if others:
        sys.path[:] = [p for p in sys.path if p not in others and p != root] + [root, *others]
