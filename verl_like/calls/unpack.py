"""The arguments of a call as the method gets them: slots filled, batches copied, futures resolved.

Counterpart of `verl_like.calls.pack`, in the worker process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_like.batch.protocol import DataProto, Shard
from verl_like.batch.split import place_chunk
from verl_like.calls.messages import ChunkSlot, Header, RemoteError, Slot
from verl_like.calls.result import BATCH, BOTH
from verl_like.errors import DispatchError


class UpstreamError(Exception):
    """An argument could not be had because the call that makes it failed."""

    def __init__(self, error: RemoteError):
        self.error = error


@dataclass(frozen=True)
class Chunk:
    """What a method was given of a split batch: rows, pad rows included, and whose they are."""

    num_rows: int
    shard: Shard


def chunk_of(arguments: Iterable[Any]) -> Chunk | None:
    """The chunk that results of a call are measured by: the first among its arguments."""
    for value in arguments:
        if isinstance(value, DataProto) and value.shard is not None:
            return Chunk(len(value), value.shard)
    return None


def fill(value: Any, parts: Sequence[Any], readonly: bool) -> Any:
    """An argument with its slots filled.

    A batch is a private copy unless the method promised not to write.
    """
    if isinstance(value, ChunkSlot):
        headers = _checked(value.headers, parts)
        _require_batch(headers[value.index])
        rows = [header.rows or 0 for header in headers]
        value = place_chunk(parts[value.payload], value.index, rows)
    elif isinstance(value, Slot):
        value = parts[value.part]

    if readonly:
        return value
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        return value.copy()
    return value.writable_copy() if isinstance(value, DataProto) else value


def _checked(numbers: Sequence[int], parts: Sequence[Any]) -> list[Header]:
    """The headers among the parts; the error of a call that failed is raised."""
    found = [parts[number] for number in numbers]
    if len(found) == 1 and isinstance(found[0], list):
        found = found[0]
    headers = [Header.read(value) for value in found]
    for header in headers:
        if header.error is not None:
            raise UpstreamError(header.error)
    return headers


def _require_batch(header: Header) -> None:
    """Refuse what was passed on as a batch and is none: its method declares nothing."""
    if header.returned not in (BATCH, BOTH):
        raise DispatchError(
            f"{header.role}.{header.method} returned {header.returned} on rank {header.rank}; its "
            "future was passed on as a batch, so it must return a DataProto."
        )
