"""Batches in Ray's object store, each of them once: several roles read the same columns of a step.

    part, keeper = small_or_stored(batch)
    actor.method.remote(part)           # as long as somebody has `keeper`

A batch that is put while somebody holds what an equal one became is that one. The future of a call
holds its keepers, so that a batch stays no longer than the calls that it was for. One that is small
without its padding goes with the call: to put it, and to pass a reference, would cost the driver
several times as much.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import ray
import xxhash

from verl_like.backends.ray.packing import Packed, pack_batch
from verl_like.calls.wire import SHARED_BYTES


class Stored:
    """A value in the store, as long as this is held."""

    def __init__(self, reference: Any) -> None:
        """`reference` is a Ray `ObjectRef`."""
        self.reference = reference


_held: weakref.WeakValueDictionary[tuple[str, bytes], Stored] = weakref.WeakValueDictionary()
"""By connection to a cluster, and content."""
_putting = threading.Lock()


def small_or_stored(value: Any) -> tuple[Any, Stored | None]:
    """What a call gets beside it, and what that needs to be held for."""
    packed = pack_batch(value)
    if packed is not None and packed.num_bytes < SHARED_BYTES:
        return packed, None
    stored = put_once(value if packed is None else packed)
    return stored.reference, stored


def put_once(value: Any) -> Stored:
    """The value in the store; a batch, packed or not, is looked for among those that are held."""
    packed = value if isinstance(value, Packed) else pack_batch(value)
    if packed is None:
        return Stored(ray.put(value))

    digest = xxhash.xxh3_128(packed.head)
    for buffer in packed.buffers:
        digest.update(buffer.raw())
    key = ray.get_runtime_context().get_worker_id(), digest.digest()
    with _putting:
        stored = _held.get(key)
        if stored is None:
            stored = _held[key] = Stored(ray.put(packed))
        return stored
