"""Calls as tasks of Ray actors. Payloads stay in the object store and go from worker to worker as references."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray import cloudpickle as ray_pickle
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError

from verl_like.errors import WaitTimeoutError, WorkerDiedError
from verl_like.host import HostFacts, WorkerHost
from verl_like.split import regroup_pieces
from verl_like.transport import Call, Header, Pending, Transport
from verl_like.watch import Deadlines, Patience, raise_start_errors

OWN_PACKAGES = ("verl_like", "workers", "trainer")


class RayHost:
    """The actor class: a `WorkerHost` behind Ray's method calls. Stacks are answered by a thread of their own."""

    def __init__(self, recipes: bytes, facts: HostFacts) -> None:
        """The roles come pickled: what they import must be ours, even where the driver's folder holds namesakes."""
        prefer_own_packages()
        import torch

        torch.set_num_threads(1)
        self._host = WorkerHost(ray_pickle.loads(recipes), facts)

    def open_store(self, port: int) -> tuple[str, int]:
        """Bind the rendezvous store on this node."""
        return self._host.open_store(ray.util.get_node_ip_address(), port)

    def start(self, master: tuple[str, int] | None) -> Header:
        """Construct the roles."""
        return self._host.start(master)

    @ray.method(num_returns=2)
    def call(self, call: Call, *parts: Any) -> tuple[Any, Header]:
        """Run one method: payload and header."""
        return self._host.call(call, parts)

    @ray.method(concurrency_group="control")
    def stacks(self) -> str:
        """What the process is doing, asked past the queue of calls."""
        return self._host.stacks()


HostActor = ray.remote(concurrency_groups={"control": 1})(RayHost)  # type: ignore[call-overload]


def prefer_own_packages() -> None:
    """Move folders with namesakes of our packages behind our own on the import path (Ray puts the driver's folder "
    "first)."""
    root = str(Path(__file__).resolve().parents[2])
    others = [
        p for p in sys.path if p != root and any((Path(p) / f).exists() for n in OWN_PACKAGES for f in (n, f"{n}.py"))
    ]
    if others:
        sys.path[:] = [p for p in sys.path if p not in others and p != root] + [root, *others]


class RayTransport(Transport):
    """Calls travel as actor tasks with two results; a payload stays in the object store until somebody asks for it."""

    kind = "ray"

    def __init__(
        self,
        actors: Sequence[Any],
        facts: Sequence[HostFacts],
        deadlines: Deadlines,
        master_port: int,
        where: Sequence[str],
    ):
        """Lets rank 0 bind the rendezvous and constructs the roles everywhere."""
        self.actors, self.facts, self.deadlines, self.where = list(actors), list(facts), deadlines, list(where)
        self.world_size, self.finished, self.abandoned = len(actors), [], deque()
        self.process_key = id(self)
        try:
            master = self._await("rendezvous", [self.actors[0].open_store.remote(master_port)])[0]
            self.started = self._await("start", [actor.start.remote(master) for actor in self.actors])
            raise_start_errors(self, self.started)
        except BaseException:
            self.shutdown()
            raise

    def _await(self, what: str, references: Sequence[Any]) -> list[Any]:
        patience = Patience(f"{what} of {self.facts[0].name}", self.deadlines.start_s, self.deadlines.warn_s)
        waiting = list(references)
        while waiting:
            waiting = ray.wait(waiting, num_returns=len(waiting), timeout=patience.remaining())[1]
            late = ", ".join(self.describe(rank) for rank, reference in enumerate(references) if reference in waiting)
            if waiting and patience.over():
                raise WaitTimeoutError(
                    f"{patience.what} took longer than {patience.limit_s:.0f} s: no answer from {late}."
                )
            patience.warn_if_old(late)
        return [self.fetch(reference) for reference in references]

    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """Queue an actor task."""
        payload, header = self.actors[rank].call.remote(call, *parts)
        return Pending(rank, payload, header)

    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """Those that are in the store, or failed."""
        ready: list[Any] = ray.wait(list(references), num_returns=len(references), timeout=seconds, fetch_local=False)[
            0
        ]
        return ready

    def fetch(self, reference: Any) -> Any:
        """Bring it to this process."""
        try:
            return ray.get(reference)
        except (RayActorError, OutOfMemoryError) as error:
            raise WorkerDiedError(f"the worker process is gone: {_cause(error)}") from None

    def fetch_all(self, references: Sequence[Any], seconds: float) -> list[Any] | None:
        """One request for everything; a failure among them is for `fetch` to explain."""
        try:
            return list(ray.get(list(references), timeout=seconds))
        except (RayError, GetTimeoutError):
            return None

    def stacks(self, seconds: float) -> dict[int, str]:
        """Asked through the actors' second thread."""
        asked = [actor.stacks.remote() for actor in self.actors]
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=seconds)
        found = {}
        for rank, reference in enumerate(asked):
            if reference in ready:
                try:
                    found[rank] = ray.get(reference, timeout=seconds)
                except (RayError, GetTimeoutError):
                    continue
        return found

    def regroup(self, pending: Sequence[Pending], num_pieces: int) -> list[Pending]:
        """A task cuts the rows again; they do not pass through the driver."""
        flat = [p.header for p in pending] + [p.payload for p in pending]
        made = _regroup.options(num_returns=2 * num_pieces).remote(num_pieces, *flat)
        return [Pending(i, made[2 * i], made[2 * i + 1]) for i in range(num_pieces)]

    def describe(self, rank: int) -> str:
        """The role or roles, rank and place."""
        fact = self.facts[rank]
        logs = f", log {fact.log_dir}/{fact.name.split('+')[0]}-{rank}.log" if fact.log_dir else ""
        return f"{fact.name} rank {rank} of {self.world_size} ({self.where[rank]}{logs})"

    def shutdown(self) -> None:
        """Kill the actors."""
        if ray.is_initialized():
            for actor in self.actors:
                ray.kill(actor)

    def share(self, value: Any) -> Any:
        """Into the object store, once for all ranks."""
        return ray.put(value)


@ray.remote(num_cpus=0)
def _regroup(num_pieces: int, *flat: Any) -> tuple[Any, ...]:
    half = len(flat) // 2
    return tuple(value for pair in regroup_pieces(flat[:half], flat[half:], num_pieces) for value in pair)


def _cause(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text.split("The actor died", 1)[-1].strip(" .:") if "The actor died" in text else text
