"""How a batch crosses a process border: tensors travel as out-of-band buffers of pickle protocol 5.

`DataProto.__reduce_ex__` packs here and the receiving pickle unpacks here. A large contiguous CPU
tensor is copied on neither side, so what arrives may be memory that others see too:
`DataProto.writable_copy` makes it private.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from verl_like.batch.columns import Array, tensors_of
from verl_like.batch.tensordicts import TensorDict

SMALL_BYTES = 4096
"""Up to this size a column is copied when it is loaded: to lay a tensor over the bytes takes
longer.
"""
Wire = tuple[int, dict[str, tuple[torch.dtype, tuple[int, ...], Any]]]


def pack_tensors(batch: TensorDict | None, protocol: int) -> Wire | None:
    """The rows of a TensorDict and, for each column, dtype, shape and bytes (a buffer from protocol
    5 on).
    """
    if batch is None:
        return None
    return int(batch.batch_size[0]), {
        name: (column.dtype, tuple(column.shape), _buffer_of(column, protocol))
        for name, column in tensors_of(batch).items()
    }


def unpack_tensors(wire: Wire | None) -> TensorDict | None:
    """The TensorDict again, its columns lying in the buffers they came in."""
    if wire is None:
        return None
    rows, columns = wire
    return TensorDict(
        {name: _tensor_over(*column) for name, column in columns.items()}, batch_size=[rows]
    )


def pack_array(column: Array) -> Array:
    """An array that numpy itself hands over out of band: contiguous, unless it holds objects."""
    return column if column.dtype.hasobject else np.ascontiguousarray(column)


def _buffer_of(column: torch.Tensor, protocol: int) -> Any:
    """The bytes of a tensor; a reshape to one dim first because `view` wants the last stride to be
    1.
    """
    if not column.numel():
        return b""
    flat: Any = column.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return pickle.PickleBuffer(flat) if protocol >= 5 else flat.tobytes()


def _tensor_over(dtype: torch.dtype, shape: tuple[int, ...], buffer: Any) -> torch.Tensor:
    """A tensor over a buffer: without a copy, unless the copy is quicker."""
    num_bytes = len(buffer if isinstance(buffer, bytes) else memoryview(buffer))
    if not num_bytes:
        return torch.empty(shape, dtype=dtype)
    if num_bytes <= SMALL_BYTES:
        return torch.frombuffer(bytearray(buffer), dtype=dtype).reshape(shape)
    flat: NDArray[np.uint8] = np.frombuffer(buffer, dtype=np.uint8)
    if not flat.flags.writeable:
        flat = np.asarray(_DeclaredWritable(flat))
    return torch.from_numpy(flat).view(dtype).view(shape)


class _DeclaredWritable:
    """The memory of a read-only array without its flag: torch has no read-only tensors and would
    warn at each one.
    """

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = array  # keeps the memory alive as long as the new array lives
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}
