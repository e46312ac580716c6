"""Calls as tasks of Ray actors. Payloads stay in the object store and go from worker to worker as references."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from verl_like import stacks
from verl_like.errors import WorkerDiedError, WorkerError
from verl_like.host import HostFacts
from verl_like.ray_backend.cluster import NodeProbe
from verl_like.split import regroup_pieces
from verl_like.transport import Call, Held, Pending, Transport
from verl_like.watch import Deadlines, wait_for_calls


class RayTransport(Transport):
    """Calls travel as actor tasks with two results; a payload stays in the object store until somebody asks for it."""

    kind = "ray"

    def __init__(
        self,
        actors: Sequence[Any],
        facts: Sequence[HostFacts],
        deadlines: Deadlines,
        master_port: int,
        names: Sequence[str],
    ):
        """Lets rank 0 bind the rendezvous and constructs the roles everywhere."""
        super().__init__(facts, deadlines)
        self.actors, self.names = list(actors), list(names)
        self._calls = [actor.call for actor in actors]
        self._probe = NodeProbe()
        self._nodes: dict[int, str] = {}
        try:
            master = self.actors[0].open_store.remote(master_port)
            asked = [actor.start.remote(master) for actor in self.actors]
            calls = [Pending(rank, node, header, facts[0].name) for rank, (node, header) in enumerate(asked)]
            self.started = wait_for_calls(self, f"start of {facts[0].name}", calls, setting="start_s")
            self._nodes = dict(enumerate(ray.get([call.payload for call in calls])))
        except BaseException:
            self.shutdown()
            raise

    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """Queue an actor task. A call without arguments goes as a line of text, which Ray need not pickle."""
        bare = not (call.args or call.kwargs)
        payload, header = self._calls[rank].remote(f"{call.role}\n{call.method}" if bare else call, *parts)
        return Pending(rank, payload, header, call.role)

    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """Those that are in the store, or failed; none when Ray has been shut down."""
        if not ray.is_initialized():
            return []
        wanted = list(references)
        ready: list[Any] = ray.wait(wanted, num_returns=len(wanted), timeout=seconds, fetch_local=False)[0]
        return ready

    def fetch(self, reference: Any) -> Any:
        """Bring it to this process."""
        try:
            return ray.get(reference)
        except (RayActorError, OutOfMemoryError) as error:
            raise WorkerDiedError(f"the worker process is gone: {_cause(error)}") from None
        except RayTaskError as error:
            if isinstance(error.cause, WorkerError):
                raise error.cause from None
            raise WorkerError(f"arguments or result cannot travel between processes: {error.cause}") from None
        except RayError as error:
            raise WorkerError(f"Ray cannot bring the answer: {error}") from None

    def fetch_all(self, references: Sequence[Any], seconds: float) -> list[Any] | None:
        """One request for everything; a failure among them is for `fetch` to explain."""
        try:
            return list(ray.get(list(references), timeout=seconds))
        except (RayError, GetTimeoutError):
            return None

    def stacks(self, seconds: float) -> dict[int, str]:
        """Asked through the actors' second thread; of one on this machine that cannot answer, by signal."""
        asked = [actor.stacks.remote() for actor in self.actors]
        ready, _ = ray.wait(asked, num_returns=len(asked), timeout=seconds)
        here = ray.get_runtime_context().get_node_id()
        found = {}
        for rank, reference in enumerate(asked):
            if reference in ready:
                try:
                    found[rank] = ray.get(reference, timeout=seconds)
                except (RayError, GetTimeoutError):
                    continue
            elif self._nodes.get(rank) == here and (path := self.facts[rank].log_path()):
                if text := stacks.by_signal(self.started[rank].pid, path):
                    found[rank] = text
        return found

    def regroup(self, pending: Sequence[Pending], num_pieces: int, even: bool = True) -> list[Pending]:
        """A task cuts the rows again; they do not pass through the driver."""
        flat = [p.header for p in pending] + [p.payload for p in pending]
        made = _regroup.options(num_returns=2 * num_pieces).remote(num_pieces, even, *flat)
        return [Pending(i, made[2 * i], made[2 * i + 1], pending[0].role) for i in range(num_pieces)]

    def place(self, rank: int) -> str:
        """The process and its node; before it has started, the actor's name."""
        if rank not in self._nodes:
            return f"actor {self.names[rank]}"
        return f"pid {self.started[rank].pid} on {self._probe.name(self._nodes[rank])}"

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        """Ranks whose node's Ray daemon does not answer any more."""
        return {rank: why for rank in ranks if rank in self._nodes and (why := self._probe.why_gone(self._nodes[rank]))}

    def shutdown(self) -> None:
        """Kill the actors."""
        if ray.is_initialized():
            for actor in self.actors:
                ray.kill(actor)

    def share(self, value: Any) -> Any:
        """Into the object store, once for all ranks."""
        return ray.put(value)

    def hold(self, reference: Any) -> Any:
        """The reference itself: Ray resolves only what is a task's own argument."""
        return HeldReference(reference)


class HeldReference(Held):
    """A reference that the worker resolves when it asks for the value."""

    def get(self) -> Any:
        """Wait for it and bring it to the worker's process."""
        return ray.get(self.value)


@ray.remote(num_cpus=0)
def _regroup(num_pieces: int, even: bool, *flat: Any) -> tuple[Any, ...]:
    half = len(flat) // 2
    return tuple(value for pair in regroup_pieces(flat[:half], flat[half:], num_pieces, even) for value in pair)


def _cause(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text.split("The actor died", 1)[-1].strip(" .:") if "The actor died" in text else text
