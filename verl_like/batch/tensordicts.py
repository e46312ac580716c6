"""TensorDicts as batches and back, for code that speaks tensordict.

Tensors stay columns, rows of numpy columns become a `NonTensorStack`, and an entry of `meta_info`
becomes `NonTensorData`. Nested tensors of the jagged layout are ragged columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from verl_like.batch.columns import Array, object_rows
from verl_like.batch.ragged import Ragged
from verl_like.batch.tensordict_import import NonTensorData, NonTensorStack, TensorDict
from verl_like.errors import BatchError

Parts = tuple[TensorDict | None, dict[str, Array], dict[str, Any]]
"""`batch`, `non_tensor_batch` and `meta_info` of a `DataProto`."""


def merge_parts(
    rows: int, tensors: Mapping[str, torch.Tensor], arrays: dict[str, Array], meta: dict[str, Any]
) -> TensorDict:
    """One TensorDict of all three parts; a name that two of them have is an error."""
    merged: dict[str, Any] = {**tensors}
    for name, array in arrays.items():
        if name in merged:
            raise BatchError(
                f"to_tensordict: {name!r} is a tensor and a non-tensor column; rename() one."
            )
        # tensordict has no stack of no rows, so one is put in and cut off again
        merged[name] = NonTensorStack(*map(NonTensorData, array), NonTensorData(None))[:rows]

    for key, value in meta.items():
        if key in merged:
            raise BatchError(
                f"to_tensordict: {key!r} is a column and a key of meta_info; rename() the column."
            )
        merged[key] = NonTensorData(value, batch_size=[rows])
    return TensorDict(merged, batch_size=[rows])


def split_parts(whole: TensorDict) -> Parts:
    """The three parts in a TensorDict, which may be one of `merge_parts`."""
    if whole.batch_dims != 1:
        raise BatchError(
            f"A batch has one batch dim; this TensorDict has {tuple(whole.batch_size)}."
        )
    tensors: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    meta: dict[str, Any] = {}
    for name in map(str, whole.keys()):
        column = whole.get(name)
        if isinstance(column, NonTensorStack):
            arrays[name] = object_rows(column.tolist())
        elif isinstance(column, NonTensorData):
            meta[name] = column.data
        else:
            tensors[name] = column

    if arrays and not tensors:
        return None, arrays, meta
    return TensorDict(tensors, batch_size=whole.batch_size, device=whole.device), arrays, meta


def is_nested(column: Any) -> bool:
    """Whether it is a nested tensor."""
    return bool(getattr(column, "is_nested", False))


def ragged_of_nested(name: str, column: Any) -> Ragged:
    """A nested tensor as a ragged column, as wide as its longest row."""
    if column.layout != torch.jagged:
        raise BatchError(
            f"Column {name!r} is a nested tensor of the strided layout, which torch itself takes "
            "back: make it with torch.nested.as_nested_tensor(rows, layout=torch.jagged)."
        )
    rows = column.unbind()
    dim = column._ragged_idx - 1
    between = rows[0].shape[:dim]  # dims between the rows and the one whose length is a row's own
    lengths = torch.tensor([row.shape[dim] for row in rows])
    lengths = lengths.view(-1, *[1] * dim).expand(-1, *between).contiguous()
    values = torch.cat([row.flatten(0, dim) for row in rows])
    return Ragged(values, lengths, int(lengths.max()))


def nested_of_ragged(column: Ragged) -> torch.Tensor:
    """The inverse of `ragged_of_nested`."""
    between = column.lengths.shape[1:]
    spans = column.flatten().rows()
    each = between.numel()
    rows = [torch.stack(spans[first : first + each]) for first in range(0, len(spans), each)]
    jagged = [row.view(*between, -1, *column.values.shape[1:]) for row in rows]
    return torch.nested.as_nested_tensor(jagged, layout=torch.jagged)
