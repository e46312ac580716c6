"""References to results that lie in this process, or will: `Done` values and futures."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from verl_like.calls.messages import Pending
from verl_like.calls.pieces import regroup_pieces


@dataclass(frozen=True, eq=False)
class Done:
    """A reference to something that is there already."""

    value: Any


def resolve(value: Any) -> Any:
    """References anywhere in a message's lists and tuples, as values; waits for them."""
    if isinstance(value, Future):
        return value.result()
    if isinstance(value, Done):
        return value.value
    if type(value) in (list, tuple):
        return type(value)(map(resolve, value))
    return value


def regroup_here(pending: Sequence[Pending], num_pieces: int) -> list[Pending]:
    """Pieces cut again in this process: now if they are there, otherwise by a thread that waits."""
    role = pending[0].role
    made = [Pending(rank, Future[Any](), Future[Any](), role) for rank in range(num_pieces)]
    waiting = [p.header for p in pending if isinstance(p.header, Future) and not p.header.done()]
    if waiting:
        work = pending, made
        threading.Thread(target=_cut, args=work, name="regroup", daemon=True).start()
    else:
        _cut(pending, made)
    return made


def _cut(pending: Sequence[Pending], made: Sequence[Pending]) -> None:
    """Fill the futures of the new pieces."""
    try:
        headers = [resolve(p.header) for p in pending]
        payloads = [resolve(p.payload) for p in pending]
        pieces = regroup_pieces(headers, payloads, len(made))
    except Exception as error:  # noqa: BLE001 - it belongs to whoever reads these futures
        for piece in made:
            piece.header.set_exception(error)
            piece.payload.set_exception(error)
        return
    for piece, (payload, header) in zip(made, pieces, strict=True):
        piece.payload.set_result(payload)
        piece.header.set_result(header)
