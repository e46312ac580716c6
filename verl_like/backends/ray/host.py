"""The actor that a worker process is on Ray: a `WorkerHost` behind Ray's method calls."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import ray

from verl_like.backends.ray import side_channel
from verl_like.calls.messages import Answer, Call, answer_of
from verl_like.errors import WorkerError
from verl_like.process.child import ROOT
from verl_like.process.facts import ProcessFacts
from verl_like.process.host import WorkerHost


@dataclass(frozen=True)
class Location:
    """Where a worker process lives, and its side channel."""

    node: str
    endpoint: side_channel.Endpoint


class RayHost:
    """The actor class.

    Calls run in turn, in the main thread: threads of Ray's own would slow down every one.
    """

    def __init__(self, recipes: bytes, facts: ProcessFacts, own_packages: list[str]) -> None:
        """The roles come pickled: what they import is found only once the import path is right."""
        prefer_own_packages(own_packages)
        import torch

        torch.set_num_threads(1)
        self._host = WorkerHost(recipes, facts)
        self._location: Location | None = None

    def facts(self) -> ProcessFacts:
        """What this process was started with."""
        return self._host.facts

    def location(self) -> Location:
        """Which node this is, and the side channel, which answers from the first question on."""
        if self._location is None:
            self._location = self._open_side_channel()
        return self._location

    def _open_side_channel(self) -> Location:
        handlers = {
            side_channel.STACKS: lambda _: self._host.stacks().encode(),
            side_channel.PROGRESS: lambda _: self._host.progress().packed(),
            side_channel.CALL: self._call_past_queue,
            side_channel.KILL: _kill_this_process,
        }
        # on one machine nobody comes from elsewhere
        one_node = self._host.facts.one_node
        address = "127.0.0.1" if one_node else ray.util.get_node_ip_address()
        endpoint = side_channel.serve(address, handlers)
        return Location(ray.get_runtime_context().get_node_id(), endpoint)

    def open_store(self, port: int) -> tuple[str, int] | WorkerError:
        """Bind the rendezvous store on this node; an error goes to `start`, which reports it."""
        try:
            return self._host.open_store(ray.util.get_node_ip_address(), port)
        except WorkerError as error:
            return error

    def start(self, master: tuple[str, int] | WorkerError) -> bytes:
        """Construct the roles."""
        return self._host.start(master).packed()

    def construct_again(self) -> bytes:
        """Construct the roles anew."""
        return self._host.construct_again().packed()

    def roles_there(self) -> bytes:
        """The header of a call that does nothing: another driver learns the meshes from it."""
        role = self._host.facts.name.split("+")[0]
        return self._host.call(Call(role, "ping"), ())[1].packed()

    def call(self, call: bytes | tuple[Any, ...], *parts: Any) -> Answer:
        """Run one method: header and payload in one object, for each has its price.

        `call` holds role and method, then the arguments, if there are any; mostly it is pickled.
        """
        payload, header = self._host.call(_unpacked(call), parts)
        return answer_of(payload, header)

    @ray.method(num_returns=2)
    def call_for_batch(self, call: bytes | tuple[Any, ...], *parts: Any) -> tuple[Any, bytes]:
        """Run one method whose payload may go to other workers, without its header."""
        payload, header = self._host.call(_unpacked(call, returns_batch=True), parts)
        return payload, header.packed()

    def _call_past_queue(self, request: bytes) -> bytes:
        payload, header = self._host.call(pickle.loads(request), ())
        reply: bytes = cloudpickle.dumps(answer_of(payload, header))
        return reply


def _kill_this_process(_: bytes) -> bytes:
    os.kill(os.getpid(), signal.SIGKILL)
    return b""


HostActor = ray.remote(RayHost)


def _unpacked(call: bytes | tuple[Any, ...], returns_batch: bool = False) -> Call:
    """The call; one without arguments travels as role and method alone."""
    parts: tuple[Any, ...] = pickle.loads(call) if isinstance(call, bytes) else call
    role, method, args, kwargs = parts if len(parts) == 4 else (*parts, (), {})
    return Call(role, method, args, kwargs, returns_batch)


def own_packages() -> list[str]:
    """The packages that this process has found in the same folder as ours."""
    found = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if "." not in name and file and Path(file).parent == Path(ROOT, name):
            found.append(name)
    return found


def prefer_own_packages(names: Iterable[str]) -> None:
    """Import these from our folder: those that hold namesakes move behind it on the import path.

    Ray puts the driver's folder first.
    """
    files = {file for name in names for file in (name, f"{name}.py")}
    others = [path for path in sys.path if path != ROOT and files & _entries(path)]
    if others:
        rest = [path for path in sys.path if path not in others and path != ROOT]
        sys.path[:] = [*rest, ROOT, *others]


def _entries(folder: str) -> set[str]:
    return set(os.listdir(folder)) if os.path.isdir(folder) else set()
