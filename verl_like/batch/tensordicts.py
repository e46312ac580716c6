"""Convert batches to TensorDicts and back, for code that uses tensordict.

Tensors stay columns, rows of numpy columns become a `NonTensorStack`, and an entry of `meta_info`
becomes `NonTensorData`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from verl_like.batch.columns import Array, object_rows
from verl_like.batch.tensordict_import import NonTensorData, NonTensorStack, TensorDict
from verl_like.errors import BatchError

Parts = tuple[TensorDict | None, dict[str, Array], dict[str, Any]]
"""`batch`, `non_tensor_batch` and `meta_info` of a `DataProto`."""


def merge_parts(
    rows: int, tensors: Mapping[str, torch.Tensor], arrays: dict[str, Array], meta: dict[str, Any]
) -> TensorDict:
    """Return one TensorDict of all three parts; a name in two parts is an error."""
    merged: dict[str, Any] = {**tensors}
    for name, array in arrays.items():
        if name in merged:
            raise BatchError(
                f"to_tensordict: {name!r} is a tensor and a non-tensor column. Rename the tensor "
                "column with rename()."
            )
        # tensordict cannot stack zero rows, so one row is added and cut off again
        merged[name] = NonTensorStack(*map(NonTensorData, array), NonTensorData(None))[:rows]

    for key, value in meta.items():
        if key in merged:
            raise BatchError(
                f"to_tensordict: {key!r} is a column and a key of meta_info. Drop one of them with "
                "pop()."
            )
        merged[key] = NonTensorData(value, batch_size=[rows])
    return TensorDict(merged, batch_size=[rows])


def split_parts(tensordict: TensorDict) -> Parts:
    """Return the three parts of a TensorDict, from `merge_parts` or any other source."""
    if tensordict.batch_dims != 1:
        raise BatchError(
            "a batch has one batch dim, but this TensorDict has batch_size "
            f"{tuple(tensordict.batch_size)}."
        )
    tensors: dict[str, Any] = {}
    arrays: dict[str, Array] = {}
    meta: dict[str, Any] = {}
    for name in map(str, tensordict.keys()):
        column = tensordict.get(name)
        if isinstance(column, NonTensorStack):
            arrays[name] = object_rows(column.tolist())
        elif isinstance(column, NonTensorData):
            meta[name] = column.data
        else:
            tensors[name] = column

    if arrays and not tensors:
        return None, arrays, meta
    return (
        TensorDict(tensors, batch_size=tensordict.batch_size, device=tensordict.device),
        arrays,
        meta,
    )
