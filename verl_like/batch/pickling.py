"""Pickling of a batch's columns as out-of-band buffers of pickle protocol 5.

Neither side copies a large contiguous CPU tensor. The receiver's memory may therefore be shared
with other processes; `DataProto.writable_copy` makes it private. A ragged column travels as its
values and spans.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from verl_like.batch.ragged import ColumnValues, RaggedTensor
from verl_like.tensor_ops import INTEGERS

SMALL_BYTES = 4096
"""Columns up to this size are copied into the pickle, because a view of a buffer takes longer."""

Packed = tuple[torch.dtype, tuple[int, ...], Any]
"""A tensor in a pickle: dtype, shape, and bytes."""

Columns = dict[str, Packed | tuple[Packed, Packed, Packed, int, float]]
"""Columns in a pickle; a ragged column is its values, lengths, starts, width and fill."""


def pack_columns(columns: Mapping[str, ColumnValues], protocol: int) -> Columns:
    """Return the columns in picklable form; from protocol 5 on, large bytes are buffers."""
    packed: Columns = {}
    spans: dict[int, Packed] = {}  # lengths that several columns share travel once
    for name, column in columns.items():
        if isinstance(column, RaggedTensor):
            for tensor in (column.lengths, column.starts):
                if id(tensor) not in spans:
                    spans[id(tensor)] = _pack(tensor, protocol)
            where = spans[id(column.lengths)], spans[id(column.starts)]
            packed[name] = _pack(column.values, protocol), *where, column.width, column.fill
        else:
            packed[name] = _pack(column, protocol)
    return packed


def unpack_columns(packed: Columns) -> dict[str, ColumnValues]:
    """Return the columns; large ones are views of the buffers that they arrived in."""
    columns: dict[str, ColumnValues] = {}
    for name, parts in packed.items():
        if len(parts) == 3:
            columns[name] = _tensor_over(*parts)
        else:
            values, lengths, starts, width, fill = parts
            spans = _tensor_over(*lengths), width, _tensor_over(*starts)
            columns[name] = RaggedTensor.from_checked(_tensor_over(*values), *spans, fill)
    return columns


def _pack(column: torch.Tensor, protocol: int) -> Packed:
    dtype, shape = column.dtype, tuple(column.shape)
    if not column.numel():
        return dtype, shape, b""
    bits = column.detach().cpu()
    if column.element_size() in INTEGERS:  # numpy does not have every dtype
        bits = bits.view(INTEGERS[column.element_size()])
    array = bits.numpy()
    if protocol < 5 or array.nbytes <= SMALL_BYTES:
        return dtype, shape, array.tobytes()
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return dtype, shape, pickle.PickleBuffer(flat)


def _tensor_over(dtype: torch.dtype, shape: tuple[int, ...], buffer: Any) -> torch.Tensor:
    """Return a tensor over a buffer, without a copy unless the copy is faster."""
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
    """The memory of a read-only array, declared writable.

    Torch has no read-only tensors and would warn for each array.
    """

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = array  # keeps the memory alive as long as the new array lives
        self.__array_interface__ = array.__array_interface__ | {"data": (array.ctypes.data, False)}
