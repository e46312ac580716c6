"""The base class of every backend's transport, which carries calls to worker processes.

Example:

    pending = transport.submit(rank, call, parts)   # references to payload and header
    ready = transport.wait(references, seconds)     # the references with an answer or a failure
    value = transport.fetch(reference)              # the value, or the error of a dead process
    transport.kill(rank)                            # for an injected fault
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from verl_like.calls.deadlines import CallTimes, Deadlines
from verl_like.calls.messages import Call, Header, Pending
from verl_like.errors import WorkerDiedError, WorkerError
from verl_like.process.info import ProcessInfo

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_FINISHED = 100_000
"""Maximum number of finished calls whose headers wait to be taken."""


@dataclass(frozen=True)
class AnswerPart:
    """A reference to the payload (0) or the header (1) of a future's answer."""

    answer: Future[Any]
    position: int


def resolve(value: Any) -> Any:
    """Wait for the futures in a message and their parts; return the message with their values."""
    if isinstance(value, AnswerPart):
        return value.answer.result()[value.position]
    if isinstance(value, Future):
        return value.result()
    if type(value) in (list, tuple):
        return type(value)(map(resolve, value))
    return value


class Transport(ABC):
    """Carries calls to the processes of one pool.

    Every process runs a `WorkerHost`. Several threads of the driver may call. References are
    futures, or parts of their results, unless a backend has its own.
    """

    kind: str
    """Transports of one kind can wait for, fetch and pass on each other's references."""
    can_kill: ClassVar[bool] = False
    """True if the ranks have their own processes, separate from the driver's."""
    has_store: ClassVar[bool] = False
    """True if the ranks of a node read what `share` stored without a copy."""
    started: list[Header]
    """The header of each rank from the construction of its roles."""

    def __init__(self, processes: Sequence[ProcessInfo], deadlines: Deadlines) -> None:
        self.processes, self.deadlines, self.world_size = list(processes), deadlines, len(processes)
        self.process_key = id(self)
        """Equal for groups whose workers share processes."""
        self.started = []
        self.finished: deque[Header] = deque(maxlen=MAX_FINISHED)
        """Headers of the last finished calls, oldest first, for `take_finished`."""
        self.abandoned: deque[tuple[str, list[Any]]] = deque()
        """Name and header references of each call whose future was dropped before it was read."""
        self.call_times = CallTimes()
        self.companions: Sequence[Transport] = ()
        """The transports of other pools that a run needs to continue."""
        self.is_replaceable = False
        """True if other pools may finish the work when a rank of this one is lost."""
        self._has_warned_of_loss = False

    @abstractmethod
    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """Queue a call on one process; references or values in `parts` fill the call's slots."""

    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """Return the references that are answered or have failed within that time.

        Return at the first answer or failure; a backend may wait for more of them.
        """
        futures = {getattr(reference, "answer", reference) for reference in references}
        done = wait_futures(futures, seconds, FIRST_COMPLETED).done
        return [
            reference for reference in references if getattr(reference, "answer", reference) in done
        ]

    def fetch(self, reference: Any) -> Any:
        """Return the value behind a reference that is ready.

        Raise `WorkerDiedError` if its process died.
        """
        return resolve(reference)

    def fetch_together(self, references: Sequence[Any], seconds: float) -> list[Any] | None:
        """Return the values behind all these references, or None if one is late or lost."""
        missing = set(references)
        until = time.monotonic() + seconds
        while missing:
            missing.difference_update(self.wait(list(missing), max(0.0, until - time.monotonic())))
            if missing and time.monotonic() >= until:
                return None
        try:
            return [self.fetch(reference) for reference in references]
        except WorkerError:
            return None

    @abstractmethod
    def stacks(self, seconds: float) -> dict[int, str]:
        """Return the Python stack of every process that responds in time, even during a call."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the processes. Safe to call twice."""

    @abstractmethod
    def construct_again(self) -> None:
        """Construct every rank's roles again in the same processes, and wait for it."""

    @abstractmethod
    def place(self, rank: int) -> str:
        """Describe the process and machine of a rank."""

    def describe(self, rank: int, role: str | None = None) -> str:
        """Describe a rank for messages: role, place, and that role's log."""
        process, place = self.processes[rank], self.place(rank)
        path = process.log_path(role)
        if path:
            place = f"{place}, log {path}"
        return f"{role or process.name} rank {rank} of {self.world_size} ({place})"

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the ranks whose process is gone or stopped, each with the reason.

        The reference of a call does not always report the loss, and an idle rank has no call.
        """
        return {}

    def kill(self, rank: int) -> None:
        """Send SIGKILL to the process of a rank, for an injected fault."""
        raise NotImplementedError(f"the processes of {self.kind} cannot be killed")

    def check_idle(self, wait_name: str) -> None:
        """Raise if a rank is gone, while `wait_name` is waited for.

        The loss of a replaceable pool is only logged, once. The next call on it fails.
        """
        for rank, why in self.lost(range(self.world_size)).items():
            words = f"{self.describe(rank)}, idle during {wait_name}: {why}"
            if not self.is_replaceable:
                raise WorkerDiedError(words)
            if not self._has_warned_of_loss:
                logger.warning("%s It will be replaced on its next use.", words)
            self._has_warned_of_loss = True

    def take_finished(self) -> list[Header]:
        """Return the headers of the calls finished since the last time, for a timeline."""
        return list(take_all(self.finished))

    @staticmethod
    def share(value: Any) -> tuple[Any, Any]:
        """Store a large value once, in a backend that has an object store.

        Return a reference to pass to calls, and the object that keeps the value alive.
        """
        return value, None

    def join(self, references: Sequence[Any]) -> Any | None:
        """Return one reference to a list of these values, or None to pass them one by one.

        If a future is passed to N ranks, each needs the headers of all N chunks. With one
        reference, the call passes N arguments instead of N².
        """
        return None

    def report_abandoned(self) -> None:
        """Log the failures of finished calls whose futures are gone."""
        for name, headers in take_all(self.abandoned):
            if len(self.wait(headers, 0.0)) < len(headers):
                self.abandoned.append((name, headers))
                continue
            try:
                errors = (Header.read(self.fetch(reference)).error for reference in headers)
                failed = next((error.traceback for error in errors if error is not None), None)
            except WorkerError as error:
                failed = str(error)
            if failed is not None:
                logger.error("%s failed and its result was never read:\n%s", name, failed)


def take_all(entries: deque[T]) -> Iterator[T]:
    """Take out the entries that are there now, while other threads may add and take some."""
    for _ in range(len(entries)):
        try:
            entry = entries.popleft()
        except IndexError:  # another thread has taken the rest
            return
        yield entry
