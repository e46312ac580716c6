"""Calls as tasks of Ray actors. Payloads stay in the object store and go from worker to worker as references."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from verl_like import stacks
from verl_like.errors import WorkerDiedError, WorkerError
from verl_like.host import HostFacts
from verl_like.ray_backend.cluster import NodeProbe
from verl_like.ray_backend.deaths import cause_of_death
from verl_like.ray_backend.host import Home
from verl_like.split import regroup_pieces
from verl_like.transport import Call, Header, Held, Pending, Transport
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
        self._tasks: dict[tuple[int, str, str], Any] = {}
        self._probe = NodeProbe()
        self._nodes: dict[int, str] = {}
        try:
            self._homes = [actor.home.remote() for actor in self.actors]
            master = self.actors[0].open_store.remote(master_port)
            asked = [actor.start.remote(master) for actor in self.actors]
            calls = [Pending(rank, header, header, facts[0].name) for rank, header in enumerate(asked)]
            self.started = wait_for_calls(self, f"start of {facts[0].name}", calls, setting="start_s")
            self._nodes = {rank: home.node for rank, home in enumerate(ray.get(self._homes))}
        except BaseException:
            self.shutdown()
            raise

    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """Queue an actor task. It is named for the role and the method, so they need not travel as an argument."""
        key = rank, call.role, call.method
        task = self._tasks.get(key)
        if task is None:
            actor = self.actors[rank]
            method = actor.call_silent if call.silent else actor.call
            task = self._tasks[key] = method.options(name=f"{call.role}.{call.method}")
        made = task.remote((call.args, call.kwargs), *parts) if call.args or call.kwargs else task.remote()
        payload, header = (None, made) if call.silent else made
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
            raise WorkerDiedError(f"the worker process is gone: {cause_of_death(error)}") from None
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
        """Asked at the processes' doors; of one on this machine that does not answer, by signal."""
        ready, _ = ray.wait(self._homes, num_returns=len(self._homes), timeout=seconds)
        here = ray.get_runtime_context().get_node_id()

        def ask(rank: int, home: Home) -> str | None:
            text = stacks.ask(home.door, seconds)
            path = self.facts[rank].log_path()
            if text is None and home.node == here and path and rank < len(self.started):
                text = stacks.by_signal(self.started[rank].pid, path)
            return text

        homes = {rank: home for rank, ref in enumerate(self._homes) if ref in ready and (home := self._home(ref))}
        with ThreadPoolExecutor(max(len(homes), 1)) as asking:
            told = dict(zip(homes, asking.map(ask, homes, homes.values()), strict=True))
        return {rank: text for rank, text in told.items() if text is not None}

    def _home(self, reference: Any) -> Home | None:
        try:
            home: Home = ray.get(reference)
        except RayError:
            return None
        return home

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
        return Held(None) if reference is None else HeldReference(reference)


class HeldReference(Held):
    """A reference that the worker resolves when it asks for the value."""

    def get(self) -> Any:
        """Wait for it and bring it to the worker's process."""
        return ray.get(self.value)


@ray.remote(num_cpus=0)
def _regroup(num_pieces: int, even: bool, *flat: Any) -> tuple[Any, ...]:
    half = len(flat) // 2
    headers = [Header.read(header) for header in flat[:half]]
    pieces = regroup_pieces(headers, flat[half:], num_pieces, even)
    return tuple(value for payload, header in pieces for value in (payload, header.packed()))
