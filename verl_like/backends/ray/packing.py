"""Calls and batches pickled before Ray sees them: its own pickler takes several times as long.

What only Ray can pickle (references, handles of actors, functions and classes of a script) is left
to it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from ray import cloudpickle

from verl_like.batch.protocol import DataProto

ONLY_FOR_RAY = (b"__main__", b"\x03ray", b"ray.")
"""A pickle that holds one of these is left to Ray: other processes cannot import the first module,
and Ray has to count its own objects. (`\\x03` is the length of the name that follows.)
"""


class Packed:
    """A pickle whose buffers lie apart: whoever unpickles this gets the value itself."""

    def __init__(self, head: bytes, buffers: Sequence[pickle.PickleBuffer]) -> None:
        """As `pack` made them."""
        self.head, self.buffers = head, list(buffers)

    @property
    def num_bytes(self) -> int:
        """Bytes of the pickle and its buffers together."""
        return len(self.head) + sum(buffer.raw().nbytes for buffer in self.buffers)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """The buffers travel as buffers again, without a copy."""
        return _value_of, (self.head, self.buffers)


def pack(value: Any, buffers: list[pickle.PickleBuffer] | None = None) -> bytes | None:
    """The value pickled, its buffers put into that list if there is one; None: only Ray can."""
    if cloudpickle.list_registry_pickle_by_value():
        return None
    try:
        head = pickle.dumps(value, 5, buffer_callback=None if buffers is None else buffers.append)
    except Exception:  # noqa: BLE001 - objects of the user's may refuse in any way
        return None
    return None if any(word in head for word in ONLY_FOR_RAY) else head


def pack_batch(value: Any) -> Packed | None:
    """A batch pickled with its buffers; None for other values and for what only Ray can pickle."""
    buffers: list[pickle.PickleBuffer] = []
    head = pack(value, buffers) if type(value) is DataProto else None
    return None if head is None else Packed(head, buffers)


def _value_of(head: bytes, buffers: Sequence[Any]) -> Any:
    return pickle.loads(head, buffers=buffers)
