"""The arguments of one dispatched call as they travel: values, shared values, and references.

Small values go inside the call; large ones, and the results of other calls, beside it as parts. The
counterpart in the worker is `verl_like.calls.unpack`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from verl_like.batch.protocol import DataProto
from verl_like.batch.tensordict_import import TensorDict
from verl_like.calls.future import WorkerFuture
from verl_like.calls.messages import Call, Pending, PieceSlot, Slot
from verl_like.calls.pieces import FutureShard
from verl_like.calls.transport import Transport
from verl_like.errors import DispatchError

SHARED_BYTES = 100_000
"""Values from this size on travel as parts of their own.

One that goes to several ranks is shared: a backend with an object store puts it there once.
"""


class Sender:
    """Submits one call to some ranks of a group."""

    def __init__(self, transport: Transport, bare: Call):
        """`bare` is the call without its arguments."""
        self.transport, self._bare = transport, bare
        self._shared: dict[int, tuple[Any, Any]] = {}
        self.keeps: list[Any] = []
        """What must be held until the call has ended, for other calls to share it."""

    def submit(self, rank: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Pending:
        """Pack the arguments of one rank and queue its call."""
        if not args and not kwargs:
            return self.transport.submit(rank, self._bare, ())
        parts: list[Any] = []
        packed = tuple(self._pack(value, parts) for value in args)
        named = {name: self._pack(value, parts) for name, value in kwargs.items()}
        bare = self._bare
        if bare.past_queue and parts:
            raise DispatchError(
                f"{bare.role}.{bare.method} goes past the queue of calls and takes small values "
                f"only: no futures, nothing of {SHARED_BYTES} bytes or more."
            )
        return self.transport.submit(rank, replace(bare, args=packed, kwargs=named), parts)

    def _pack(self, value: Any, parts: list[Any]) -> Any:
        if isinstance(value, FutureShard):
            pieces, first = value.future.pieces, len(parts)
            parts += [pieces[value.index].payload, *(piece.header for piece in pieces)]
            return PieceSlot(first, tuple(range(first + 1, len(parts))), value.index)
        if isinstance(value, WorkerFuture):  # nobody but the driver has all of it
            value = value.batch() if value.form == "batch" else value.get()
        if num_bytes(value) >= SHARED_BYTES:
            if id(value) not in self._shared:
                part, keeper = self.transport.share(value)
                self._shared[id(value)] = value, part
                self.keeps.append(keeper)
            parts.append(self._shared[id(value)][1])
            return Slot(len(parts) - 1)
        return value


def num_bytes(value: Any) -> int:
    """The bytes of a tensor, an array or a batch; anything else is taken to be small: 0."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return int(value.nbytes)
    if isinstance(value, DataProto):
        return sum(value.num_bytes())
    return int(value.bytes()) if isinstance(value, TensorDict) else 0
