"""The arguments of one dispatched call as they travel: values, shared values, and references.

Small values go inside the call; large ones, and the results of other calls, beside it as parts. The
counterpart in the worker is `verl_like.calls.unpack`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from verl_like.batch.protocol import DataProto
from verl_like.batch.tensordict_import import TensorDict
from verl_like.calls.chunks import FutureShard
from verl_like.calls.future import WorkerFuture
from verl_like.calls.messages import Call, ChunkSlot, Pending, Slot
from verl_like.calls.transport import Transport
from verl_like.errors import DispatchError

SHARED_BYTES = 100_000
"""Values from this size on travel as parts of their own.

One that goes to several ranks is shared: a backend with an object store puts it there once.
"""


def submit_all(
    transport: Transport,
    bare: Call,
    ranks: Sequence[int],
    args: Sequence[Sequence[Any]],
    kwargs: Mapping[str, Sequence[Any]],
    counting: Sequence[int],
) -> tuple[list[Pending], list[Any]]:
    """Queue a call on each of these ranks, with its element of every argument.

    `counting` are the places of those whose results count. Also gives what must be held until the
    call has ended, for other calls to share it.
    """
    others = replace(bare, counts=False) if bare.returns_batch else bare
    calls = [others] * len(ranks)
    for place in counting:
        calls[place] = bare
    if not args and not kwargs:
        return [transport.submit(*each, ()) for each in zip(ranks, calls, strict=True)], []
    shared: dict[int, tuple[Any, Any, Any]] = {}

    def pack(value: Any, parts: list[Any]) -> Any:
        if isinstance(value, FutureShard):
            future, first = value.future, len(parts)
            parts += [future.chunks[value.index].payload, *future.headers_of_chunks]
            return ChunkSlot(first, tuple(range(first + 1, len(parts))), value.index)
        if isinstance(value, WorkerFuture):  # nobody but the driver has all of it
            value = value.batch() if value.form == "batch" else value.get()
        if id(value) not in shared:
            if num_bytes(value) < SHARED_BYTES:
                return value
            shared[id(value)] = value, *transport.share(value)
        parts.append(shared[id(value)][1])
        return Slot(len(parts) - 1)

    pending = []
    for place, rank in enumerate(ranks):
        parts: list[Any] = []
        packed = tuple(pack(values[place], parts) for values in args)
        named = {name: pack(values[place], parts) for name, values in kwargs.items()}
        if bare.past_queue and parts:
            raise DispatchError(
                f"{bare.role}.{bare.method} goes past the queue of calls and takes small values "
                f"only, nothing of {SHARED_BYTES} bytes or more."
            )
        call = replace(calls[place], args=packed, kwargs=named)
        pending.append(transport.submit(rank, call, parts))
    return pending, [keeper for _, _, keeper in shared.values()]


def num_bytes(value: Any) -> int:
    """The bytes of a tensor, an array or a batch; anything else is taken to be small: 0."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return int(value.nbytes)
    if isinstance(value, DataProto):
        return sum(value.num_bytes())
    return int(value.bytes()) if isinstance(value, TensorDict) else 0
