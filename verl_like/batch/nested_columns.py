"""Nested tensors as columns of rows, and back: a batch can then pick, pad and join them.

A nested tensor holds one tensor per row. In the jagged layout all rows have one shape but for one
dim, and lie in one buffer; in the strided layout shapes are free.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from verl_like.batch.columns import Array, object_rows


@dataclass(frozen=True, eq=False)
class NestedRow:
    """One row of a nested tensor: an entry of an object column."""

    tensor: torch.Tensor
    jagged_dim: int | None
    """The dim of `tensor` whose length is the row's own; None in the strided layout."""


def rows_of_nested(column: Any) -> Array:
    """The rows of a nested tensor, which share its memory."""
    if column.layout != torch.jagged:
        return object_rows(NestedRow(row, None) for row in column.unbind())
    dim = column._ragged_idx - 1
    starts, lengths = column.offsets().tolist(), column.lengths()
    sizes = column.offsets().diff().tolist() if lengths is None else lengths.tolist()
    values = column.values()
    return object_rows(
        NestedRow(values.narrow(dim, start, size), dim)
        for start, size in zip(starts, sizes, strict=False)
    )


def nested_of_rows(rows: Array) -> torch.Tensor:
    """The nested tensor of such rows, in memory of its own."""
    tensors = [row.tensor for row in rows]
    dim: int | None = rows[0].jagged_dim
    if dim is None:
        return torch.nested.nested_tensor(tensors)
    lengths = torch.tensor([0, *(tensor.shape[dim] for tensor in tensors)])
    offsets = lengths.cumsum(0).to(tensors[0].device)
    return torch.nested.nested_tensor_from_jagged(
        torch.cat(tensors, dim), offsets, jagged_dim=dim + 1
    )


def is_nested(array: Array) -> bool:
    """Whether an object column holds rows of a nested tensor."""
    return len(array) > 0 and array.ndim == 1 and isinstance(array[0], NestedRow)


def map_rows(rows: Array, change: Callable[[torch.Tensor], torch.Tensor]) -> Array:
    """The same column with every row's tensor changed."""
    return object_rows(NestedRow(change(row.tensor), row.jagged_dim) for row in rows)


@dataclass(frozen=True)
class PackedRows:
    """A column of nested rows in a pickle: all in one tensor, which travels as a column does."""

    name: str
    shapes: Sequence[torch.Size]
    jagged_dim: int | None


def pack_rows(name: str, rows: Array) -> tuple[PackedRows, torch.Tensor]:
    """What stands for the column, and its numbers, flat."""
    flat = torch.cat([row.tensor.reshape(-1) for row in rows])
    return PackedRows(name, [row.tensor.shape for row in rows], rows[0].jagged_dim), flat


def unpack_rows(packed: PackedRows, flat: torch.Tensor) -> Array:
    """The column again; its rows lie in `flat`."""
    parts = flat.split([shape.numel() for shape in packed.shapes])
    return object_rows(
        NestedRow(part.view(shape), packed.jagged_dim)
        for part, shape in zip(parts, packed.shapes, strict=True)
    )
