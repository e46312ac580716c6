"""Calls as tasks of Ray actors.

Payloads stay in the object store and go from worker to worker as references. Requests for stacks,
and calls that go past the queue, take the side channel (`verl_like.backends.ray.side_channel`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from contextlib import suppress
from itertools import repeat
from typing import Any

import ray
from ray.exceptions import (
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RaySystemError,
    RayTaskError,
)

from verl_like.backends.ray import side_channel
from verl_like.backends.ray.cluster import NodeProbe
from verl_like.backends.ray.death_cause import cause_of_death
from verl_like.backends.ray.ending import RELEASE_S, within
from verl_like.backends.ray.host import Location
from verl_like.backends.ray.packing import pack
from verl_like.backends.ray.past_queue import CONNECT_S, PastQueue
from verl_like.backends.ray.probes import ClusterProbe
from verl_like.backends.ray.stored import small_or_stored
from verl_like.calls import stacks
from verl_like.calls.answers import wait_for_start
from verl_like.calls.messages import Call, Header, LazyPart, Pending, payload_of
from verl_like.calls.pieces import regroup_pieces
from verl_like.calls.progress import Progress
from verl_like.calls.transport import Transport
from verl_like.calls.waiting import Deadlines
from verl_like.errors import WorkerDiedError, WorkerError, cannot_travel
from verl_like.process.facts import ProcessFacts


class RayTransport(Transport):
    """Calls travel as actor tasks; a payload stays in the object store until it is asked for."""

    kind = "ray"

    def __init__(
        self,
        actors: Sequence[Any],
        facts: Sequence[ProcessFacts],
        deadlines: Deadlines,
        start: Callable[[Sequence[Any]], list[Any]],
        names: Sequence[str],
    ):
        """Waits until every actor says that its roles are there; `start` asks them to."""
        super().__init__(facts, deadlines)
        self.actors, self.names = list(actors), list(names)
        self._tasks: dict[tuple[int, str, str], Any] = {}
        self._probe = NodeProbe()
        self._cluster = ClusterProbe()
        self._here = ray.get_runtime_context().get_node_id()
        self._nodes: dict[int, str] = {}
        try:
            self._locations = [actor.location.remote() for actor in self.actors]
            self.started = wait_for_start(self, start(self.actors))
            locations: list[Location] = ray.get(self._locations)
            self._endpoints = [location.endpoint for location in locations]
            self._past_queue = [PastQueue(endpoint) for endpoint in self._endpoints]
            self._nodes = {rank: location.node for rank, location in enumerate(locations)}
            for node in set(self._nodes.values()):
                self._probe.name(node)  # kept: without its head the cluster does not say
        except BaseException:
            self.shutdown()
            raise

    def construct_again(self) -> None:
        """A task of every actor."""
        asked = [actor.construct_again.remote() for actor in self.actors]
        self.started = wait_for_start(self, asked)

    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """One task of the actor, whose name is for the dashboard only."""
        if call.past_queue:
            answer = self._past_queue[rank].make(call)
            return Pending(rank, answer, answer, call.role)

        what: tuple[Any, ...] = call.role, call.method
        if call.args or call.kwargs:
            what = *what, call.args, call.kwargs
        # a worker cannot wait for what comes over a side channel
        here = [part.result() if isinstance(part, Future) else part for part in parts]
        made = self._task(rank, call).remote(pack(what) or what, *here)
        payload, header = made if call.returns_batch else (made, made)
        return Pending(rank, payload, header, call.role)

    def _task(self, rank: int, call: Call) -> Any:
        key = rank, call.role, call.method
        if key not in self._tasks:
            actor = self.actors[rank]
            method = actor.call_for_batch if call.returns_batch else actor.call
            self._tasks[key] = method.options(name=f"{call.role}.{call.method}")
        return self._tasks[key]

    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """Those that are in the store, or failed; none when Ray has been shut down."""
        if not ray.is_initialized():
            return []
        until = time.monotonic() + seconds
        here: list[Any] = []
        futures = [reference for reference in references if isinstance(reference, Future)]
        if futures:
            here.extend(wait_futures(futures, seconds).done)
        tasks = [reference for reference in references if not isinstance(reference, Future)]
        if tasks:
            left = max(until - time.monotonic(), 0.0)
            here += ray.wait(tasks, num_returns=len(tasks), timeout=left, fetch_local=False)[0]
        return here

    def fetch(self, reference: Any) -> Any:
        """Bring it to this process."""
        if isinstance(reference, Future):
            return reference.result()
        try:
            return ray.get(reference)
        except (RayActorError, OutOfMemoryError) as error:
            raise WorkerDiedError(f"the worker process is gone: {cause_of_death(error)}") from None
        except ObjectLostError as error:
            gone = f"the machine that held the answer is gone ({type(error).__name__})"
            raise WorkerDiedError(gone) from None
        except RayTaskError as error:
            if isinstance(error.cause, WorkerError):
                raise error.cause from None
            raise WorkerError(cannot_travel(error.cause)) from None
        except RaySystemError as error:
            reason = error.client_exc
            if isinstance(reason, Exception):  # raised by a class that was to be unpickled here
                text = cannot_travel(f"{type(reason).__name__}: {reason}")
                raise WorkerError(text) from None
            raise WorkerError(f"Ray cannot bring the answer: {error}") from None
        except RayError as error:
            raise WorkerError(f"Ray cannot bring the answer: {error}") from None

    def fetch_all(
        self, pending: Sequence[Pending], seconds: float
    ) -> tuple[list[Header], list[Any]] | None:
        """One request for everything; a failure among them is for `fetch` to explain."""
        headers = [p.header for p in pending]
        if any(isinstance(reference, Future) for reference in headers):
            return None
        apart = [p.payload for p in pending if not p.is_one_answer]
        try:
            values = list(ray.get([*headers, *apart], timeout=seconds))
        except RayError:
            return None
        answers, payloads = values[: len(headers)], iter(values[len(headers) :])
        both = zip(pending, answers, strict=True)
        return (
            [Header.read(answer) for answer in answers],
            [payload_of(answer) if p.is_one_answer else next(payloads) for p, answer in both],
        )

    def stacks(self, seconds: float) -> dict[int, str]:
        """Asked over the side channels; of a silent process on this machine, by signal."""
        ready, _ = ray.wait(self._locations, num_returns=len(self._locations), timeout=seconds)
        locations = {}
        for rank, reference in enumerate(self._locations):
            if reference in ready and (location := _location(reference)):
                locations[rank] = location
        here = ray.get_runtime_context().get_node_id()

        def ask(rank: int, location: Location) -> str | None:
            text = side_channel.ask_stacks(location.endpoint, seconds)
            path = self.facts[rank].log_path()
            if text is None and location.node == here and path and rank < len(self.started):
                text = stacks.stack_by_signal(self.started[rank].pid, path)
            return text

        with ThreadPoolExecutor(max(len(locations), 1)) as asking:
            texts = asking.map(ask, locations, locations.values())
            answered = dict(zip(locations, texts, strict=True))
        return {rank: text for rank, text in answered.items() if text is not None}

    def progress(self, seconds: float) -> dict[int, Progress]:
        """Asked over the side channels of processes whose roles are there."""
        if len(self._nodes) < self.world_size:
            return {}
        with ThreadPoolExecutor(self.world_size) as asking:
            answers = asking.map(side_channel.ask_progress, self._endpoints, repeat(seconds))
            return {rank: found for rank, found in enumerate(answers) if found is not None}

    def regroup(
        self, pending: Sequence[Pending], num_pieces: int, even: bool = True
    ) -> list[Pending]:
        """A task cuts the rows again; they do not pass through the driver."""
        flat = [p.header for p in pending] + [p.payload for p in pending]
        made = _regroup.options(num_returns=2 * num_pieces).remote(num_pieces, even, *flat)
        role = pending[0].role
        return [Pending(i, made[2 * i], made[2 * i + 1], role) for i in range(num_pieces)]

    def place(self, rank: int) -> str:
        """The process and its node; before it has started, the actor's name."""
        if rank not in self._nodes:
            return f"actor {self.names[rank]}"
        return f"pid {self.started[rank].pid} on {self._probe.name(self._nodes[rank])}"

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        """Ranks without a head, a node's daemon, or a process: whoever does not listen any more."""
        gone = {}
        head = self._cluster.why_head_gone() if self._nodes else None
        for rank in ranks:
            if rank not in self._nodes:
                continue
            endpoint = self._endpoints[rank]
            why = head or self._probe.why_gone(self._nodes[rank])
            why = why or self._cluster.why_worker_gone(endpoint.address, endpoint.port)
            if why is not None:
                gone[rank] = why
        return gone

    def pid_here(self, rank: int) -> int | None:
        """The actor's process, if its node is this one."""
        if self._nodes.get(rank) != self._here:
            return None
        return self.started[rank].pid

    def can_kill(self, rank: int) -> bool:
        """Whoever has a side channel."""
        return rank in self._nodes

    def kill(self, rank: int) -> None:
        """Asked over the side channel, from which the worker's end comes as an answer."""
        endpoint = self._endpoints[rank]
        with suppress(OSError):
            side_channel.read_reply(
                side_channel.send_request(endpoint, side_channel.KILL, b"", CONNECT_S)
            )

    def shutdown(self) -> None:
        """Kill the actors; a cluster that does not answer is left alone."""
        if ray.is_initialized():
            within(RELEASE_S, self._kill, f"ending the workers of {self.facts[0].name}")

    def _kill(self) -> None:
        for actor in self.actors:
            ray.kill(actor)

    def share(self, value: Any) -> tuple[Any, Any]:
        """Into the object store, once for all ranks, unless it is small without its padding."""
        return small_or_stored(value)

    def lazy_part(self, reference: Any) -> Any:
        """The reference itself: Ray resolves only what is a task's own argument."""
        if isinstance(reference, Future):
            return LazyPart(reference.result())
        return LazyReference(reference)


def start_roles(master_port: int) -> Callable[[Sequence[Any]], list[Any]]:
    """Lets rank 0 bind the rendezvous and constructs the roles everywhere."""

    def start(actors: Sequence[Any]) -> list[Any]:
        master = actors[0].open_store.remote(master_port)
        return [actor.start.remote(master) for actor in actors]

    return start


def attach(actors: Sequence[Any]) -> list[Any]:
    """Finds roles that were constructed for another driver."""
    return [actor.roles_there.remote() for actor in actors]


class LazyReference(LazyPart):
    """A reference that the worker resolves when it asks for the value."""

    def get(self) -> Any:
        """Wait for it and bring it to the worker's process."""
        return ray.get(self.value)


def _location(reference: Any) -> Location | None:
    """Where a process lives; None if it died before it could say."""
    try:
        location: Location = ray.get(reference)
    except RayError:
        return None
    return location


@ray.remote(num_cpus=0)
def _regroup(num_pieces: int, even: bool, *flat: Any) -> tuple[Any, ...]:
    half = len(flat) // 2
    headers = [Header.read(header) for header in flat[:half]]
    pieces = regroup_pieces(headers, flat[half:], num_pieces, even)
    return tuple(value for payload, header in pieces for value in (payload, header.packed()))
