"""How a batch is pickled: its columns travel as out-of-band buffers of pickle protocol 5.

A large contiguous CPU tensor is copied on neither side. So what arrives may be memory that other
processes see too: `DataProto.writable_copy` makes it private. One of less than `LARGE_BYTES` that
is mostly padding travels as its runs (`verl_like.batch.runs`), inside the pickle.
"""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from verl_like.batch.columns import Array, tensors_of
from verl_like.batch.runs import pack_runs, unpack_runs
from verl_like.batch.tensordict_import import TensorDict

SMALL_BYTES = 4096
"""Up to this size a column is copied when it is loaded: a view of the bytes would take longer."""
ENTRY_SIZES = (1, 2, 4, 8)
"""Bytes of an entry that an integer can stand for."""
LARGE_BYTES = 1 << 20
"""From this size on a column is not looked at, but shared: that is quicker than any packing."""

Columns = dict[str, tuple[torch.dtype, tuple[int, ...], Any]]
"""Tensors in a pickle: dtype, shape, and bytes or runs of each."""

Tensors = tuple[int, Columns]
"""A TensorDict in a pickle: number of rows, and its columns."""


def pack_tensors(batch: TensorDict | None, protocol: int) -> Tensors | None:
    """What stands for a TensorDict in a pickle; the bytes are a buffer from protocol 5 on."""
    if batch is None:
        return None
    return int(batch.batch_size[0]), pack_columns(tensors_of(batch), protocol)


def unpack_tensors(packed: Tensors | None) -> TensorDict | None:
    """The TensorDict again, its columns lying in the buffers they came in."""
    if packed is None:
        return None
    rows, columns = packed
    return TensorDict(unpack_columns(columns), batch_size=[rows])


def pack_columns(tensors: dict[str, torch.Tensor], protocol: int) -> Columns:
    """What stands for tensors in a pickle."""
    return {
        name: (column.dtype, tuple(column.shape), _buffer_of(column, protocol))
        for name, column in tensors.items()
    }


def unpack_columns(packed: Columns) -> dict[str, torch.Tensor]:
    """The tensors again, lying in the buffers that they came in."""
    return {name: _tensor_over(*column) for name, column in packed.items()}


def pack_array(column: Array) -> Array:
    """An array that numpy itself hands over out of band: contiguous, unless it holds objects."""
    return column if column.dtype.hasobject else np.ascontiguousarray(column)


def _buffer_of(column: torch.Tensor, protocol: int) -> Any:
    """The bytes of a tensor, or its runs."""
    if not column.numel():
        return b""
    # one dim first: a view of another dtype wants the last stride to be 1
    flat: Any = column.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    size = column.element_size()
    if SMALL_BYTES < flat.nbytes < LARGE_BYTES and size in ENTRY_SIZES:
        runs = pack_runs(flat.view(f"i{size}"))
        if runs is not None:
            return runs
    return pickle.PickleBuffer(flat) if protocol >= 5 else flat.tobytes()


def _tensor_over(dtype: torch.dtype, shape: tuple[int, ...], buffer: Any) -> torch.Tensor:
    """A tensor over a buffer: without a copy, unless the copy is quicker."""
    if isinstance(buffer, tuple):
        entries = unpack_runs(buffer, math.prod(shape), dtype.itemsize)
        return torch.from_numpy(entries).view(dtype).view(shape)
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
    """The memory of a read-only array without its flag.

    Torch has no read-only tensors and would warn at each one.
    """

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = array  # keeps the memory alive as long as the new array lives
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}
