"""The base class of every backend's transport, which carries calls to worker processes.

pending = transport.submit(rank, call, parts)   # references to payload and header
ready = transport.wait(references, seconds)     # those that are there
value = transport.fetch(reference)              # the value, or the error of a dead process
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

from verl_like.calls.messages import Call, Header, Pending, payload_of
from verl_like.calls.progress import Progress
from verl_like.calls.waiting import CallTimes, Deadlines
from verl_like.errors import WorkerDiedError, WorkerError
from verl_like.process.facts import ProcessFacts

logger = logging.getLogger(__name__)
T = TypeVar("T")
FINISHED_KEPT = 100_000
"""Headers kept of finished calls that nobody takes."""


class Transport(ABC):
    """Carries calls to the processes of one pool.

    Every process runs a `WorkerHost`, one call at a time. Several threads of the driver may call.
    """

    kind: str
    can_kill: ClassVar[bool] = False
    """Whether the ranks have processes that are not the driver's own, on whatever machine."""
    world_size: int
    deadlines: Deadlines
    facts: Sequence[ProcessFacts]
    """What every rank was started with."""
    process_key: int
    """Equal for groups whose workers live in the same processes."""
    started: list[Header]
    """What every rank said when its roles were constructed."""
    finished: deque[Header]
    """Headers of the last finished calls, oldest first, for `take_finished`."""
    abandoned: deque[tuple[str, list[Any]]]
    """Name and header references of every call whose future nobody read."""

    def __init__(self, facts: Sequence[ProcessFacts], deadlines: Deadlines) -> None:
        self.facts, self.deadlines, self.world_size = list(facts), deadlines, len(facts)
        self.process_key = id(self)
        self.started, self.finished, self.abandoned = [], deque(maxlen=FINISHED_KEPT), deque()
        self.call_times = CallTimes()
        self.companions: Sequence[Transport] = ()
        """Those of other pools without which a run cannot go on."""
        self.is_replaceable = False
        """Whether others may finish what they are doing when this one is lost."""
        self._is_said_lost = False
        self.other_pools: Sequence[Transport] = ()
        """All others of the run: a call here may be waiting for a process there."""

    @abstractmethod
    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """Queue a call on one process; references or values in `parts` fill the call's slots."""

    @abstractmethod
    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """The references that are there, or have failed, within that time.

        Returns as soon as all of them are; a backend may return as soon as one is.
        """

    @abstractmethod
    def fetch(self, reference: Any) -> Any:
        """The value behind a reference that is there.

        Raises `WorkerDiedError` if its process died.
        """

    def fetch_payload(self, pending: Pending) -> Any:
        """The payload of a call whose header is there."""
        value = self.fetch(pending.payload)
        return payload_of(value) if pending.is_one_answer else value

    def fetch_payloads(self, pending: Sequence[Pending]) -> list[Any]:
        """The payloads of calls whose headers are there."""
        return [self.fetch_payload(each) for each in pending]

    def fetch_header(self, reference: Any) -> Header:
        """The header behind a reference that is there."""
        return Header.read(self.fetch(reference))

    def fetch_headers(self, references: Sequence[Any]) -> list[Header | WorkerError]:
        """The headers behind references that are there, or why one cannot be had."""
        found: list[Header | WorkerError] = []
        for reference in references:
            try:
                found.append(self.fetch_header(reference))
            except WorkerError as error:
                found.append(error)
        return found

    def fetch_all(
        self, pending: Sequence[Pending], seconds: float
    ) -> tuple[list[Header], list[Any]] | None:
        """Headers and payloads, if they all come within that time, where one step can do it.

        The calls may be those of other transports of this kind. None: use `wait`, `fetch_header`
        and `fetch_payload`.
        """
        return None

    @abstractmethod
    def stacks(self, seconds: float) -> dict[int, str]:
        """The Python stacks of every process that answers in that time, past the queue of calls."""

    def progress(self, seconds: float) -> dict[int, Progress]:
        """What every process is doing that answers in that time, past the queue of calls."""
        return {}

    @abstractmethod
    def shutdown(self) -> None:
        """End the processes. Safe to call twice."""

    @abstractmethod
    def construct_again(self) -> None:
        """Construct every rank's roles anew, in the processes that there are; waits for it."""

    @abstractmethod
    def place(self, rank: int) -> str:
        """Process and machine of a rank, in words."""

    def describe(self, rank: int, role: str | None = None) -> str:
        """A rank for messages: role, place, and where that role's log is."""
        facts = self.facts[rank]
        place = ", ".join(part for part in (self.place(rank), facts.log_in_words(role)) if part)
        return f"{role or facts.name} rank {rank} of {self.world_size} ({place})"

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        """The ranks that can never answer, each with the reason: its process is gone or stopped.

        References to calls do not always say so, and an idle rank has none.
        """
        return {}

    def kill(self, rank: int) -> None:
        """End the process of a rank by SIGKILL, for a fault on purpose."""
        raise NotImplementedError(f"the processes of {self.kind} are not killed")

    def check_companions(self, what: str) -> None:
        """Raise if a rank of another pool is gone, while `what` is waited for."""
        for other in self.companions:
            other.check_idle(what)

    def check_idle(self, what: str) -> None:
        """Raise if a rank is gone, while `what` is waited for.

        Of a pool that can be replaced it is only said, once: whoever calls it next will see.
        """
        for rank, why in self.lost(range(self.world_size)).items():
            words = f"{self.describe(rank)}, idle during {what}: {why}"
            if not self.is_replaceable:
                raise WorkerDiedError(words)
            if not self._is_said_lost:
                logger.warning("%s It is replaced when it is needed next.", words)
            self._is_said_lost = True

    def take_finished(self) -> list[Header]:
        """The headers of the calls finished since the last time: what a timeline is drawn from."""
        return list(take_all(self.finished))

    def share(self, value: Any) -> tuple[Any, Any]:
        """A large value that ranks will get, and what keeps it: a backend with a store puts it
        there.
        """
        return value, None

    def join(self, references: Sequence[Any]) -> Any | None:
        """One reference to a list of these values; None where they are passed one by one.

        Each of N ranks that gets a future's chunk needs all N headers.
        """
        return None

    def report_abandoned(self) -> None:
        """Log the failures of finished calls that nobody will ask for any more."""
        for name, headers in take_all(self.abandoned):
            if len(self.wait(headers, 0.0)) < len(headers):
                self.abandoned.append((name, headers))
                continue
            try:
                errors = (self.fetch_header(reference).error for reference in headers)
                failed = next((error.traceback for error in errors if error is not None), None)
            except WorkerError as error:
                failed = str(error)
            if failed is not None:
                logger.error("%s failed and its result was never read:\n%s", name, failed)


def take_all(entries: deque[T]) -> Iterator[T]:
    """What is there now, taken out; other threads may add and take at the same time."""
    for _ in range(len(entries)):
        try:
            entry = entries.popleft()
        except IndexError:  # another thread has taken the rest
            return
        yield entry
