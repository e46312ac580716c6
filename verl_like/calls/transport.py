"""What travels between the driver and a worker process, and the small base that every backend
implements.

    pending = transport.submit(rank, call, parts)      # two references: payload and header
    ready   = transport.wait(references, seconds)      # those that are there
    value   = transport.fetch(reference)               # the value, or the error of a process that died

`WorkerGroup` is the caller; the transports are `local_backend.InlineTransport` (the caller's
thread), `local_backend.ChildTransport` (child processes) and `ray_backend.RayTransport`. A call's
header is small and tells the driver what came back without the data.
"""

from __future__ import annotations

import contextlib
import logging
import marshal
import pickle
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from verl_like.errors import WorkerError

if TYPE_CHECKING:
    from verl_like.calls.waiting import Deadlines
    from verl_like.process.host import HostFacts

logger = logging.getLogger(__name__)
FINISHED_KEPT = 100_000
"""Headers kept of finished calls that nobody takes."""


@dataclass(frozen=True)
class Slot:
    """Stands in a call's arguments for part number `part`, which travels beside the call as a
    reference.
    """

    part: int


@dataclass(frozen=True)
class PieceSlot:
    """Stands for a piece of another group's result: payload at `payload`, headers of all its pieces
    at `headers`.
    """

    payload: int
    headers: tuple[int, ...]
    index: int


@dataclass(frozen=True)
class WholeSlot:
    """Stands for the whole of another call's result: its pieces with their headers, and how they
    become one value.
    """

    payloads: tuple[int, ...]
    headers: tuple[int, ...]
    form: str


@dataclass(frozen=True)
class LazySlot:
    """Stands for what another slot stands for, but reaches the method as a `FutureArgument`: its
    parts travel held.
    """

    slot: PieceSlot | WholeSlot


class Held:
    """A part that is not resolved on the way: the worker gets it when it asks.

    Backends with a store subclass this.
    """

    def __init__(self, value: Any) -> None:
        """A value that is there; or, in a subclass, a reference."""
        self.value = value

    def get(self) -> Any:
        """The value."""
        return self.value


@dataclass(frozen=True)
class Call:
    """One method call on one worker. Arguments may hold slots that `parts` fill.

    A `silent` method is declared to return None: there may be no payload to wait for. For an
    `awaited` call somebody waits at once and nothing else: a backend that has a quicker way for
    small calls may take it. One that goes `past_queue` runs at once, in a thread of its own beside
    whatever is running; it has no slots.
    """

    role: str
    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    silent: bool = False
    awaited: bool = False
    past_queue: bool = False


@dataclass
class RemoteError:
    """An exception as it left a worker: pickled, if it can be, and its traceback as text."""

    pickled: bytes | None
    type_name: str
    traceback: str

    def rebuild(self, where: str) -> BaseException:
        """The exception to raise on the driver, of its own type, with the worker's place and
        traceback as a note.
        """
        error: BaseException | None = None
        if self.pickled is not None:
            with contextlib.suppress(Exception):  # its class may be importable in the worker only
                error = pickle.loads(self.pickled)
        if error is None:
            error = WorkerError(
                f"{where} raised {self.type_name}, an exception that cannot be sent to the driver."
            )
        error.add_note(f"raised in {where}\n{self.traceback.rstrip()}")
        return error


@dataclass(slots=True)
class Header:
    """What the driver learns of a finished call at once: who ran it, when, how many rows came back,
    or why it failed.

    `rows` counts the real rows of the payload; rows after them are padding. `metrics` are what the
    method returned beside its batch, or instead of one. `only_padding`: the rank had no real row.
    """

    role: str
    method: str
    rank: int
    pid: int
    start: float
    end: float
    cpu_s: float
    rows: int | None = None
    keys: tuple[str, ...] = ()
    error: RemoteError | None = None
    mesh_facts: dict[str, dict[str, tuple[int, bool]]] | None = None
    metrics: dict[str, Any] | None = None
    only_padding: bool = False

    def packed(self) -> bytes:
        """The values alone, by the quickest way there is: a header comes with every call."""
        error: Any = self.error and (self.error.pickled, self.error.type_name, self.error.traceback)
        times = self.start, self.end, self.cpu_s
        return marshal.dumps(
            (
                self.role,
                self.method,
                self.rank,
                self.pid,
                *times,
                self.rows,
                self.keys,
                error,
                self.mesh_facts,
                self.metrics,
                self.only_padding,
            )
        )

    @staticmethod
    def read(value: Header | bytes) -> Header:
        """A header as it arrived: packed, or as it is."""
        if not isinstance(value, bytes):
            return value
        header = Header(*marshal.loads(value))
        if header.error is not None:
            header.error = RemoteError(*cast("tuple[bytes | None, str, str]", header.error))
        return header


@dataclass(frozen=True)
class Pending:
    """The two references that a submitted call gives at once; the payload is None if it will be
    None.
    """

    rank: int
    payload: Any
    header: Any
    role: str


class Transport(ABC):
    """Carries calls to the processes of one pool.

    Every process runs a `WorkerHost`, one call at a time.
    """

    kind: str
    world_size: int
    deadlines: Deadlines
    facts: Sequence[HostFacts]
    """What every rank was started with."""
    process_key: int
    """Equal for groups whose workers live in the same processes."""
    started: list[Header]
    """What every rank said when its roles were constructed."""
    finished: deque[Header]
    """Headers of the last finished calls, oldest first, for `take_finished`."""
    abandoned: deque[tuple[str, list[Any]]]
    """Name and header references of every call whose future was dropped unread, for
    `report_abandoned`.
    """

    def __init__(self, facts: Sequence[HostFacts], deadlines: Deadlines) -> None:
        """Nothing is started yet."""
        self.facts, self.deadlines, self.world_size = list(facts), deadlines, len(facts)
        self.process_key = id(self)
        self.started, self.finished, self.abandoned = [], deque(maxlen=FINISHED_KEPT), deque()

    @abstractmethod
    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """Queue a call on one process; `parts` are references or values
        that fill the call's slots.
        """

    @abstractmethod
    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """Those of the references that are there (or failed) within that time; all of them as soon
        as they are.
        """

    @abstractmethod
    def fetch(self, reference: Any) -> Any:
        """The value behind a reference that is there.

        Raises `WorkerDiedError` if its process died.
        """

    def fetch_payload(self, pending: Pending) -> Any:
        """The payload of a call whose header is there."""
        return None if pending.payload is None else self.fetch(pending.payload)

    def fetch_header(self, reference: Any) -> Header:
        """The header behind a reference that is there."""
        return Header.read(self.fetch(reference))

    def fetch_all(self, references: Sequence[Any], seconds: float) -> list[Any] | None:
        """The values, if they all come within that time: one step where a backend has it.

        None: `wait` and `fetch`.
        """
        return None

    @abstractmethod
    def stacks(self, seconds: float) -> dict[int, str]:
        """The Python stacks of every process that answers in that time, past the queue of calls."""

    @abstractmethod
    def regroup(
        self, pending: Sequence[Pending], num_pieces: int, even: bool = True
    ) -> list[Pending]:
        """The same rows in another number of pieces, cut by `split.regroup_pieces`; does not wait
        for them.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """End the processes. Safe to call twice."""

    @abstractmethod
    def place(self, rank: int) -> str:
        """Process and machine of a rank, in words."""

    def describe(self, rank: int, role: str | None = None) -> str:
        """A rank for messages: role, place, and where that role's log is."""
        facts = self.facts[rank]
        place = ", ".join(part for part in (self.place(rank), facts.log_in_words(role)) if part)
        return f"{role or facts.name} rank {rank} of {self.world_size} ({place})"

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        """Those of the ranks that can never answer although no reference says so, and why: a
        machine that is gone.
        """
        return {}

    def hold(self, reference: Any) -> Any:
        """A part that reaches the worker unresolved, as a `Held`."""
        return Held(self.fetch(reference))

    def take_finished(self) -> list[Header]:
        """The headers of the calls finished since the last time: what a timeline is drawn from."""
        return [self.finished.popleft() for _ in range(len(self.finished))]

    def share(self, value: Any) -> Any:
        """A value that several ranks will get: backends with a store put it there once."""
        return value

    def report_abandoned(self) -> None:
        """Log the failures of finished calls that nobody will ask for any more."""
        for _ in range(len(self.abandoned)):
            name, headers = self.abandoned.popleft()
            if len(self.wait(headers, 0.0)) < len(headers):
                self.abandoned.append((name, headers))
                continue
            try:
                failed = next(
                    (
                        h.error.traceback
                        for h in map(self.fetch_header, headers)
                        if h.error is not None
                    ),
                    None,
                )
            except WorkerError as error:
                failed = str(error)
            if failed is not None:
                logger.error("%s failed and its result was never read:\n%s", name, failed)
