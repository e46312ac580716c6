"""The arguments of a call as they reach the method: slots filled, batches as private copies,
futures as values.

Counterpart of `verl_like.calls.pack`; called by `verl_like.process.host` in the worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verl_like.batch.protocol import DataProto, Shard
from verl_like.batch.split import drop_padding, join_pieces, place_piece, require_batch
from verl_like.calls.transport import (
    Header,
    Held,
    LazySlot,
    PieceSlot,
    RemoteError,
    Slot,
    WholeSlot,
)


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
    """What a method with `materialize_futures=False` gets for a future:

    `get()` waits for the value and gives it.
    """

    def __init__(self, slot: PieceSlot | WholeSlot, parts: Sequence[Held], readonly: bool):
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
        return value


def fill(value: Any, parts: Sequence[Any], readonly: bool) -> Any:
    """An argument with its slots filled; a batch is a private copy unless the method promised not
    to write.
    """
    if isinstance(value, LazySlot):
        slot = value.slot
        numbers = (
            *slot.headers,
            *(slot.payloads if isinstance(slot, WholeSlot) else [slot.payload]),
        )
        here = {number: place for place, number in enumerate(numbers)}
        headers = tuple(here[number] for number in slot.headers)
        if isinstance(slot, WholeSlot):
            slot = replace(
                slot, headers=headers, payloads=tuple(here[number] for number in slot.payloads)
            )
        else:
            slot = replace(slot, headers=headers, payload=here[slot.payload])
        return FutureArgument(slot, [parts[number] for number in numbers], readonly)
    if isinstance(value, WholeSlot):
        return _whole(
            [parts[i] for i in value.payloads],
            _checked([parts[i] for i in value.headers]),
            value.form,
        )
    if isinstance(value, PieceSlot):
        headers_of_all = _checked([parts[i] for i in value.headers])
        piece = require_batch(parts[value.payload], headers_of_all[value.index])
        value = place_piece(piece, value.index, [header.rows or 0 for header in headers_of_all])
    elif isinstance(value, Slot):
        value = parts[value.part]
    if readonly:
        return value
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        return value.copy()
    return value.writable_copy() if isinstance(value, DataProto) else value


def _whole(payloads: Sequence[Any], headers: Sequence[Header], form: str) -> Any:
    """The value that the future's `get()` would give on the driver."""
    pieces = [
        drop_padding(payload, header) for payload, header in zip(payloads, headers, strict=True)
    ]
    if form == "batch":
        return join_pieces(
            [require_batch(piece, header) for piece, header in zip(pieces, headers, strict=True)]
        )
    own = [
        piece.slice(0, len(piece)) if isinstance(piece, DataProto) else piece for piece in pieces
    ]
    return own[0] if form == "first" else own


def _checked(arrived: list[Header | bytes]) -> list[Header]:
    headers = [Header.read(header) for header in arrived]
    for header in headers:
        if header.error is not None:
            raise UpstreamError(header.error)
    return headers
