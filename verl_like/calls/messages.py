"""What travels between the driver and a worker process.

A `Call` goes there; a payload and its `Header` come back. The header is small and tells the driver
what came back without the data. Where the results of other calls are arguments, slots stand for
them in the call, and their references travel beside it, as parts.
"""

from __future__ import annotations

import contextlib
import marshal
import pickle
import traceback
from dataclasses import dataclass, field
from typing import Any, cast

import cloudpickle

from verl_like.errors import WorkerError


@dataclass(frozen=True)
class Slot:
    """Stands for the value of part number `part`."""

    part: int


@dataclass(frozen=True)
class ChunkSlot:
    """Stands for one chunk of another group's result.

    `payload` is the number of its part, `headers` those of the headers of all chunks.
    """

    payload: int
    headers: tuple[int, ...]
    index: int


@dataclass(frozen=True)
class Call:
    """One method call on one worker. Arguments may hold slots, which `parts` fill.

    `returns_batch`: the result may be passed on to other workers, so the payload travels apart
    from its header. Of a rank that does not count only the header comes: another one that shares
    its model gives the same payload. A call that goes `past_queue` runs at once, in a thread of its
    own beside whatever is running; it has no slots.
    """

    role: str
    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    returns_batch: bool = False
    counts: bool = True
    past_queue: bool = False


@dataclass
class RemoteError:
    """An exception as it left a worker: pickled, if it can be, and its traceback as text."""

    pickled: bytes | None
    type_name: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> RemoteError:
        """Pickled are exceptions that the driver can raise and show.

        What is no `Exception` (an exit, say) would pass the driver's own handlers.
        """
        text = "".join(traceback.format_exception(error))
        pickled: bytes | None = None
        with contextlib.suppress(Exception):  # user exceptions may refuse in any way
            pickled = cloudpickle.dumps(error)
            if not _can_be_shown(pickle.loads(pickled)):
                pickled = None
        return cls(pickled, f"{type(error).__module__}.{type(error).__qualname__}", text)

    def rebuild(self, where: str) -> BaseException:
        """The exception to raise on the driver, of its own type.

        The worker's place and traceback are in a note.
        """
        error: BaseException | None = None
        if self.pickled is not None:
            with contextlib.suppress(Exception):  # its class may be importable in the worker only
                unpickled = pickle.loads(self.pickled)
                error = unpickled if _can_be_shown(unpickled) else None
        if error is None:
            error = WorkerError(
                f"{where} raised {self.type_name}, an exception that cannot be sent to the driver."
            )
        error.add_note(f"raised in {where}\n{self.traceback.rstrip()}")
        return error


def _can_be_shown(error: object) -> bool:
    """Whether it is an exception with a text, as all that report it expect."""
    return isinstance(error, Exception) and isinstance(str(error), str)


@dataclass(slots=True)
class Header:
    """What the driver learns of a finished call at once: who ran it, when, what came, or why not.

    `rows` counts the real rows of the payload; rows after them are padding. `metrics` are what the
    method returned beside its batch, or instead of one. `only_padding`: the rank had no real row.
    `returned` is the form of what a data-parallel method returned (`verl_like.calls.result`).
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
    returned: str = ""

    def packed(self) -> bytes:
        """The values alone, by the quickest way there is: a header comes with every call."""
        error: Any = self.error and (self.error.pickled, self.error.type_name, self.error.traceback)
        who = self.role, self.method, self.rank, self.pid
        times = self.start, self.end, self.cpu_s
        facts = self.rows, self.keys, error, self.mesh_facts
        result = self.metrics, self.only_padding, self.returned
        return marshal.dumps((*who, *times, *facts, *result))

    @staticmethod
    def read(value: Header | bytes | tuple[bytes, Any]) -> Header:
        """A header as it arrived: packed, packed with its payload, or as it is."""
        if isinstance(value, Header):
            return value
        header = Header(*marshal.loads(value if isinstance(value, bytes) else value[0]))
        if header.error is not None:
            header.error = RemoteError(*cast("tuple[bytes | None, str, str]", header.error))
        return header


Answer = bytes | tuple[bytes, Any]
"""A packed header and its payload as one value; a payload of None takes no room."""


def answer_of(payload: Any, header: Header) -> Answer:
    """Header and payload as one value."""
    return header.packed() if payload is None else (header.packed(), payload)


def payload_of(answer: Answer) -> Any:
    """The payload of an answer."""
    return answer[1] if type(answer) is tuple else None


@dataclass(frozen=True)
class Pending:
    """The references that a submitted call gives at once.

    Where header and payload travel as one `Answer`, both are the same reference.
    """

    rank: int
    payload: Any
    header: Any
    role: str

    @property
    def is_one_answer(self) -> bool:
        """Whether header and payload travel as one value."""
        return self.payload is self.header
