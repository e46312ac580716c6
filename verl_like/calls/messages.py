"""The wire format: the messages between the driver and a worker process.

A `Call` goes to the worker; a payload and its `Header` come back. The header is small and describes
the payload. Most arguments travel inside the call. Large tensors, arrays and batches, and chunks of
other calls' results, travel next to it as parts. A slot in the call stands for each part: `Packer`
makes the slots in the driver, and `unpack` fills them in the worker.
"""

from __future__ import annotations

import contextlib
import marshal
import pickle
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import torch

from verl_like.batch.protocol import DataProto, Shard
from verl_like.batch.split import RowsOfPart, place_chunk, take_rows
from verl_like.batch.tensordict_import import TensorDict
from verl_like.errors import DispatchError, WorkerError

SHARED_BYTES = 100_000
"""Larger tensors, arrays and batches travel as parts.

A part that goes to several ranks is shared: a backend with an object store puts it there once.
"""
ONLY_BATCH, ONLY_METRICS, WITH_METRICS = ("a batch", "metrics alone", "(batch, metrics)")
"""The forms of a data-parallel method's result (`verl_like.calls.result`)."""


RAISED_IN = "raised in "
"""Start of the note with the traceback in a worker."""


@dataclass(frozen=True)
class Slot:
    """A placeholder in a call for the value of part number `part`.

    If the value is chunk `index` of another group's result, `headers` are the numbers of the parts
    with the headers of all chunks. If the ranks of a node get one part, `rows` are this rank's
    first row in it, and its shard.
    """

    part: int
    headers: tuple[int, ...] = ()
    index: int = 0
    rows: tuple[int, Shard] | None = None


@dataclass(frozen=True)
class FutureChunk:
    """A chunk of a result that another group still computes: it travels as references."""

    payload: Any
    headers: Sequence[Any]
    index: int


class Call(NamedTuple):
    """One method call on one worker.

    With `returns_batch`, the result may be passed on to other workers. `sends_result` is False for
    a rank that shares its model with a rank whose result is collected: only its header comes back.
    A call with `concurrent` runs at once in its own thread, and has no slots.
    """

    role: str
    method: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    returns_batch: bool = False
    sends_result: bool = True
    concurrent: bool = False

    @property
    def payload_is_apart(self) -> bool:
        """Return whether payload and header are two values, because only the payload travels on."""
        return self.returns_batch and self.sends_result


class RemoteError(NamedTuple):
    """An exception of a worker: pickled if possible, with its traceback as text."""

    pickled: bytes | None
    type_name: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> RemoteError:
        """Pickle an exception if the driver can raise and show it.

        It cannot raise `SystemExit`, for example, which the driver's own handlers do not catch.
        """
        text = "".join(traceback.format_exception(error))
        pickled: bytes | None = None
        with contextlib.suppress(Exception):  # exceptions of users may fail in any way
            pickled = cloudpickle.dumps(error)
            if not _can_be_shown(pickle.loads(pickled)):
                pickled = None
        return cls(pickled, f"{type(error).__module__}.{type(error).__qualname__}", text)

    def rebuild(self, where: str) -> BaseException:
        """Return the exception, or a `WorkerError` for it, with its place and traceback."""
        error: BaseException | None = None
        if self.pickled is not None:
            with contextlib.suppress(Exception):  # its class may be importable in the worker only
                unpickled = pickle.loads(self.pickled)
                error = unpickled if _can_be_shown(unpickled) else None
        if error is None:
            error = WorkerError(
                f"{where} raised {self.type_name}, an exception that cannot be sent to the driver."
            )
        error.add_note(f"{RAISED_IN}{where}\n{self.traceback.rstrip()}")
        return error


def _can_be_shown(error: object) -> bool:
    """Return whether this is an exception that can be printed."""
    return isinstance(error, Exception) and isinstance(str(error), str)


class Header(NamedTuple):
    """The description of a finished call: who ran it, when, the form of its result, or its error.

    `rows` counts the real rows of the payload; rows after them are padding. `metrics` are what the
    method returned with its batch, or instead of one. `only_padding`: the rank had no real row.
    `returned` is the form of a data-parallel method's result.
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
    mesh_layout: dict[str, dict[str, tuple[int, bool]]] | None = None
    metrics: dict[str, Any] | None = None
    only_padding: bool = False
    returned: str = ""

    def packed(self) -> bytes:
        """Return the values in the fastest format, because every call has a header."""
        error: Any = None if self.error is None else tuple(self.error)
        return marshal.dumps(tuple(self._replace(error=error)))

    @staticmethod
    def read(value: Any) -> Header:
        """Return the header of an answer: packed, packed with its payload, or not packed."""
        if isinstance(value, Header):
            return value
        header = Header._make(marshal.loads(value if isinstance(value, bytes) else value[0]))
        if header.error is None:
            return header
        return header._replace(error=RemoteError._make(header.error))


Answer = bytes | tuple[bytes, Any]
"""A packed header and its payload as one value; a payload of None is left out."""


def combine_answer(payload: Any, header: Header) -> Answer:
    """Return header and payload as one value."""
    return header.packed() if payload is None else (header.packed(), payload)


def answer_payload(answer: Any) -> Any:
    """Return the payload of an answer."""
    return answer[1] if type(answer) is tuple else None


NOT_ARRIVED = object()
"""The payload of a call before it has arrived."""


@dataclass(eq=False)
class Pending:
    """A submitted call of one rank: references to its payload and header, and later its answer.

    The references are the same if header and payload travel as one `Answer`.
    """

    rank: int
    payload: Any
    header: Any
    role: str
    answer: Header | None = None
    failure: BaseException | None = None
    """The error of the method, or the reason why there is no answer."""
    value: Any = NOT_ARRIVED
    """The payload itself."""

    @property
    def is_one_answer(self) -> bool:
        """Return whether header and payload travel as one value."""
        return self.payload is self.header


# ------------------------------------------------------------------------------------ in the driver


class Packer:
    """Packs the arguments of one call for several ranks, and shares each large value once."""

    def __init__(self, share: Callable[[Any], tuple[Any, Any]]) -> None:
        """`share` is the method of the transport."""
        self._share = share
        self._shared: dict[int, tuple[Any, Any]] = {}
        """`id` -> (large value, its part). The reference to the value keeps the id valid."""
        self.keeps: list[Any] = []
        """Shared parts that must stay alive until the call has ended."""

    def pack(self, values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return a rank's arguments as they travel in its call, and the parts next to the call."""
        packed: list[Any] = []
        parts: list[Any] = []
        for value in values:
            if isinstance(value, FutureChunk):
                first = len(parts)
                parts += [value.payload, *value.headers]
                packed.append(Slot(first, tuple(range(first + 1, len(parts))), value.index))
                continue
            of_part = value if isinstance(value, RowsOfPart) else None
            large = value if of_part is None else of_part.part
            if id(large) in self._shared or num_bytes(large) >= SHARED_BYTES:
                if id(large) not in self._shared:
                    part, keeper = self._share(large)
                    self._shared[id(large)] = large, part
                    self.keeps.append(keeper)
                packed.append(Slot(len(parts), rows=None if of_part is None else of_part[1:]))
                parts.append(self._shared[id(large)][1])
            else:
                packed.append(value if of_part is None else take_rows(*of_part))
        return packed, parts


def num_bytes(value: Any) -> int:
    """Return the bytes of a tensor, an array or a batch, and 0 for any other value."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return int(value.nbytes)
    if isinstance(value, DataProto):
        return sum(value.num_bytes())
    return int(value.bytes()) if isinstance(value, TensorDict) else 0


# ------------------------------------------------------------------------------------ in the worker


class UpstreamError(Exception):
    """An argument is missing because the call that computes it failed."""

    def __init__(self, error: RemoteError):
        self.error = error


def unpack(value: Any, parts: Sequence[Any], readonly: bool) -> Any:
    """Return an argument with its slot filled; copy a batch unless the method is `readonly`.

    Raise the error of a call that was to compute a chunk of the argument.
    """
    if isinstance(value, Slot):
        slot, value = value, parts[value.part]
        if slot.rows is not None:
            value = take_rows(value, *slot.rows)
        if slot.headers:
            packed = [parts[number] for number in slot.headers]
            if len(packed) == 1 and isinstance(packed[0], list):
                packed = packed[0]
            headers = [Header.read(header) for header in packed]
            for header in headers:
                if header.error is not None:
                    raise UpstreamError(header.error)
            header = headers[slot.index]
            if header.returned not in (ONLY_BATCH, WITH_METRICS):
                raise DispatchError(
                    f"{header.role}.{header.method} returned {header.returned} on rank "
                    f"{header.rank}; its future was passed on as a batch, so it must return a "
                    "DataProto."
                )
            value = place_chunk(value, slot.index, [h.rows or 0 for h in headers])

    if readonly:
        return value
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        return value.copy()
    return value.writable_copy() if isinstance(value, DataProto) else value
