"""Calls as tasks of Ray actors, small ones over a line of their own
(`verl_like.backends.ray.line`).

Payloads stay in the object store and go from worker to worker as references.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from verl_like.backends.ray.cluster import NodeProbe
from verl_like.backends.ray.death_cause import cause_of_death
from verl_like.backends.ray.host import Home
from verl_like.backends.ray.line import Answer, Line, Payload, call_past_queue
from verl_like.backends.ray.side_channel import ask_stacks
from verl_like.batch.split import regroup_pieces
from verl_like.calls import stacks
from verl_like.calls.transport import Call, Header, Held, Pending, Transport
from verl_like.calls.waiting import Deadlines, wait_for_calls
from verl_like.errors import WorkerDiedError, WorkerError, cannot_travel
from verl_like.process.host import HostFacts

BROKEN_S = 20.0
"""How long to wait for Ray to say why a line broke."""


class RayTransport(Transport):
    """Calls travel as actor tasks with two results; a payload stays in the object store until
    somebody asks for it.
    """

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
            calls = [
                Pending(rank, header, header, facts[0].name) for rank, header in enumerate(asked)
            ]
            self.started = wait_for_calls(
                self, f"start of {facts[0].name}", calls, setting="start_s"
            )
            homes: list[Home] = ray.get(self._homes)
            self._nodes = {rank: home.node for rank, home in enumerate(homes)}
            self._doors = [home.door for home in homes]
            attend = [actor.attend.options(name="small calls").remote for actor in self.actors]
            self._lines = [Line(task, home.door) for task, home in zip(attend, homes, strict=True)]
        except BaseException:
            self.shutdown()
            raise

    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """Over the line, or as an actor task: named for role and method, so these need not travel
        as an argument.
        """
        if call.past_queue:
            return _pending(rank, call, self._at_once(rank, call))
        with self._lines[rank] as line:
            if call.awaited and not parts and (answer := line.take(call)) is not None:
                return _pending(rank, call, answer)
            line.leave()
            task = self._task(rank, call)
            made = (
                task.remote((call.args, call.kwargs), *parts)
                if call.args or call.kwargs
                else task.remote()
            )
        payload, header = (None, made) if call.silent else made
        return Pending(rank, payload, header, call.role)

    def _at_once(self, rank: int, call: Call) -> Answer:
        try:
            return call_past_queue(self._doors[rank], call)
        except OSError as error:
            where = f"{call.role}.{call.method}, {self.describe(rank, call.role)}"
            raise WorkerDiedError(
                f"{where}: the process does not open its door ({error}): it is gone."
            ) from None

    def _task(self, rank: int, call: Call) -> Any:
        key = rank, call.role, call.method
        if key not in self._tasks:
            actor = self.actors[rank]
            method = actor.call_silent if call.silent else actor.call
            self._tasks[key] = method.options(name=f"{call.role}.{call.method}")
        return self._tasks[key]

    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """Those that are in the store, or failed; none when Ray has been shut down."""
        if not ray.is_initialized():
            return []
        until = time.monotonic() + seconds
        answers = [r for r in references if isinstance(r, Answer)]
        tasks = (
            [r for r in references if not isinstance(r, Answer)] if answers else list(references)
        )
        # the last is the last to come: waiting for it first, this process wakes up less often
        answers.reverse()
        here: list[Any] = [a for a in answers if a.arrives(max(until - time.monotonic(), 0.0))]
        if tasks:
            seconds = max(until - time.monotonic(), 0.0)
            here += ray.wait(tasks, num_returns=len(tasks), timeout=seconds, fetch_local=False)[0]
        return here

    def fetch(self, reference: Any) -> Any:
        """Bring it to this process."""
        try:
            return (
                ray.get(reference)
                if isinstance(reference, ray.ObjectRef)
                else _from_line(reference)
            )
        except (RayActorError, OutOfMemoryError) as error:
            raise WorkerDiedError(f"the worker process is gone: {cause_of_death(error)}") from None
        except RayTaskError as error:
            if isinstance(error.cause, WorkerError):
                raise error.cause from None
            raise WorkerError(cannot_travel(error.cause)) from None
        except RayError as error:
            raise WorkerError(f"Ray cannot bring the answer: {error}") from None

    def fetch_all(self, references: Sequence[Any], seconds: float) -> list[Any] | None:
        """One request for everything; a failure among them is for `fetch` to explain."""
        try:
            if all(isinstance(reference, ray.ObjectRef) for reference in references):
                return list(ray.get(list(references), timeout=seconds))
            awaited = [reference for reference in references if not isinstance(reference, Payload)]
            if len(self.wait(awaited, seconds)) < len(awaited):
                return None
            return [self.fetch(reference) for reference in references]
        except (RayError, WorkerError):
            return None

    def stacks(self, seconds: float) -> dict[int, str]:
        """Asked at the processes' doors; of one on this machine that does not answer, by signal."""
        ready, _ = ray.wait(self._homes, num_returns=len(self._homes), timeout=seconds)
        here = ray.get_runtime_context().get_node_id()

        def ask(rank: int, home: Home) -> str | None:
            text = ask_stacks(home.door, seconds)
            path = self.facts[rank].log_path()
            if text is None and home.node == here and path and rank < len(self.started):
                text = stacks.by_signal(self.started[rank].pid, path)
            return text

        homes = {
            rank: home
            for rank, ref in enumerate(self._homes)
            if ref in ready and (home := self._home(ref))
        }
        with ThreadPoolExecutor(max(len(homes), 1)) as asking:
            told = dict(zip(homes, asking.map(ask, homes, homes.values()), strict=True))
        return {rank: text for rank, text in told.items() if text is not None}

    def _home(self, reference: Any) -> Home | None:
        try:
            home: Home = ray.get(reference)
        except RayError:
            return None
        return home

    def regroup(
        self, pending: Sequence[Pending], num_pieces: int, even: bool = True
    ) -> list[Pending]:
        """A task cuts the rows again; they do not pass through the driver."""
        flat = [p.header for p in pending] + [p.payload for p in pending]
        made = _regroup.options(num_returns=2 * num_pieces).remote(num_pieces, even, *flat)
        return [
            Pending(i, made[2 * i], made[2 * i + 1], pending[0].role) for i in range(num_pieces)
        ]

    def place(self, rank: int) -> str:
        """The process and its node; before it has started, the actor's name."""
        if rank not in self._nodes:
            return f"actor {self.names[rank]}"
        return f"pid {self.started[rank].pid} on {self._probe.name(self._nodes[rank])}"

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        """Ranks whose node's Ray daemon does not answer any more."""
        return {
            rank: why
            for rank in ranks
            if rank in self._nodes and (why := self._probe.why_gone(self._nodes[rank]))
        }

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


def _pending(rank: int, call: Call, answer: Answer) -> Pending:
    return Pending(rank, None if call.silent else answer.payload, answer, call.role)


def _from_line(reference: Answer | Payload) -> Any:
    answer = reference.answer if isinstance(reference, Payload) else reference
    if answer.broken and answer.task is None:
        raise WorkerDiedError("the worker process is gone: it broke off while it made the call")
    if answer.broken:
        ray.get(answer.task, timeout=BROKEN_S)
        raise WorkerError(
            "the process closed its line and lives on; nobody knows whether it made the call"
        )
    if answer.failure is not None:
        raise WorkerError(cannot_travel(answer.failure))
    if isinstance(reference, Answer):
        return answer.header
    if answer.in_store:
        return ray.get(answer.task)[0]
    try:
        return answer.load()
    except Exception as error:  # noqa: BLE001 - whatever a class does when it is unpickled
        raise WorkerError(cannot_travel(f"{type(error).__name__}: {error}")) from None


@ray.remote(num_cpus=0)
def _regroup(num_pieces: int, even: bool, *flat: Any) -> tuple[Any, ...]:
    half = len(flat) // 2
    headers = [Header.read(header) for header in flat[:half]]
    pieces = regroup_pieces(headers, flat[half:], num_pieces, even)
    return tuple(value for payload, header in pieces for value in (payload, header.packed()))
