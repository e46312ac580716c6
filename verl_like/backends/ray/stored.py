"""Batches in Ray's object store, each of them once: several roles read the same columns of a step.

    stored = put_once(batch)        # in the store now, or already
    actor.method.remote(stored.reference)

A batch that is put while somebody holds what an equal one became is that one. `Sender` calls this,
and the call's future holds it, so that a batch stays no longer than the calls that it was for.
"""

from __future__ import annotations

import pickle
import threading
import weakref
from typing import Any

import ray
import xxhash

from verl_like.backends.ray.packing import Packed, pack
from verl_like.batch.protocol import DataProto


class Stored:
    """A value in the store, as long as this is held."""

    def __init__(self, reference: Any) -> None:
        """`reference` is Ray's."""
        self.reference = reference


_held: weakref.WeakValueDictionary[tuple[str, bytes], Stored] = weakref.WeakValueDictionary()
"""By connection to a cluster, and content."""
_putting = threading.Lock()


def put_once(value: Any) -> Stored:
    """The value in the store; a batch is looked for among those that are held."""
    buffers: list[pickle.PickleBuffer] = []
    head = pack(value, buffers) if type(value) is DataProto else None
    if head is None:
        return Stored(ray.put(value))

    digest = xxhash.xxh3_128(head)
    for buffer in buffers:
        digest.update(buffer.raw())
    key = ray.get_runtime_context().get_worker_id(), digest.digest()
    with _putting:
        stored = _held.get(key)
        if stored is None:
            stored = _held[key] = Stored(ray.put(Packed(head, buffers)))
        return stored
