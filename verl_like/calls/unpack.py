"""The arguments of a call as the method gets them: slots filled, batches copied, futures resolved.

Counterpart of `verl_like.calls.pack`, in the worker process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verl_like.batch.protocol import DataProto, Shard
from verl_like.batch.split import join_pieces, place_piece
from verl_like.batch.tensordict_rows import value_of
from verl_like.calls.messages import (
    Header,
    LazyPart,
    LazySlot,
    PieceSlot,
    RemoteError,
    Slot,
    WholeSlot,
    payload_of,
)
from verl_like.calls.pieces import drop_padding, require_batch


class UpstreamError(Exception):
    """An argument could not be had because the call that makes it failed."""

    def __init__(self, error: RemoteError):
        self.error = error


@dataclass(frozen=True)
class Piece:
    """What a method was given of a split batch: rows, pad rows included, and whose they are."""

    num_rows: int
    shard: Shard


def piece_of(arguments: Iterable[Any]) -> Piece | None:
    """The piece that results of a call are measured by: the first among its arguments."""
    for value in arguments:
        if isinstance(value, FutureArgument) and value.piece is not None:
            return value.piece
        if isinstance(value, DataProto) and value.shard is not None:
            return Piece(len(value), value.shard)
    return None


class FutureArgument:
    """A future, for a method with `materialize_futures=False`: `get()` waits for the value."""

    def __init__(self, slot: PieceSlot | WholeSlot, parts: Sequence[LazyPart], readonly: bool):
        """Made by `fill`."""
        self._slot, self._parts, self._readonly = slot, parts, readonly
        self.piece: Piece | None = None

    def get(self) -> Any:
        """The value, or the error of the call that was to make it."""
        try:
            value = fill(self._slot, [part.get() for part in self._parts], self._readonly)
        except UpstreamError as upstream:
            raise upstream.error.rebuild("the call behind this future") from None
        self.piece = piece_of([value])
        return value_of(value)


def fill(value: Any, parts: Sequence[Any], readonly: bool) -> Any:
    """An argument with its slots filled.

    A batch is a private copy unless the method promised not to write.
    """
    if isinstance(value, LazySlot):
        return _unresolved(value.slot, parts, readonly)
    if isinstance(value, WholeSlot):
        return _whole(value, parts)
    if isinstance(value, PieceSlot):
        headers = _checked(value.headers, parts)
        require_batch(headers[value.index])
        rows = [header.rows or 0 for header in headers]
        value = place_piece(parts[value.payload], value.index, rows)
    elif isinstance(value, Slot):
        value = parts[value.part]

    if readonly:
        return value
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        return value.copy()
    return value.writable_copy() if isinstance(value, DataProto) else value


def _unresolved(
    slot: PieceSlot | WholeSlot, parts: Sequence[Any], readonly: bool
) -> FutureArgument:
    """A future that keeps only the parts that it needs, under numbers of its own."""
    payloads = slot.payloads if isinstance(slot, WholeSlot) else (slot.payload,)
    numbers = list(dict.fromkeys([*slot.headers, *payloads]))
    own = {number: place for place, number in enumerate(numbers)}

    headers = tuple(own[number] for number in slot.headers)
    kept: PieceSlot | WholeSlot
    if isinstance(slot, WholeSlot):
        own_payloads = tuple(own[number] for number in slot.payloads)
        kept = replace(slot, headers=headers, payloads=own_payloads)
    else:
        kept = replace(slot, headers=headers, payload=own[slot.payload])
    return FutureArgument(kept, [parts[number] for number in numbers], readonly)


def _whole(slot: WholeSlot, parts: Sequence[Any]) -> Any:
    """The value that the future's `get()` would give on the driver."""
    headers = _checked(slot.headers, parts)
    pieces = []
    for payload, number, header in zip(slot.payloads, slot.headers, headers, strict=True):
        is_one_answer = payload == number
        value = payload_of(parts[payload]) if is_one_answer else parts[payload]
        pieces.append(drop_padding(value, header))

    if slot.form == "batch":
        for header in headers:
            require_batch(header)
        return join_pieces(pieces)
    own = [value_of(p.slice(0, len(p)) if isinstance(p, DataProto) else p) for p in pieces]
    return own[0] if slot.form == "first" else own


def _checked(numbers: Sequence[int], parts: Sequence[Any]) -> list[Header]:
    """The headers among the parts; the error of a call that failed is raised."""
    headers = [Header.read(parts[number]) for number in numbers]
    for header in headers:
        if header.error is not None:
            raise UpstreamError(header.error)
    return headers
