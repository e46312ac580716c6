"""A batch as one TensorDict and back, for code that speaks tensordict.

Tensors stay columns, rows of numpy columns become a `NonTensorStack`, and an entry of `meta_info`
becomes `NonTensorData`.
"""

from __future__ import annotations

from typing import Any

from verl_like.batch.columns import Array, object_rows, tensors_of
from verl_like.batch.tensordict_import import NonTensorData, NonTensorStack, TensorDict
from verl_like.errors import BatchError

Parts = tuple[TensorDict | None, dict[str, Array], dict[str, Any]]
"""`batch`, `non_tensor_batch` and `meta_info` of a `DataProto`."""


def merge_parts(
    rows: int, batch: TensorDict | None, arrays: dict[str, Array], meta: dict[str, Any]
) -> TensorDict:
    """One TensorDict of all three parts; a name that two of them have is an error."""
    merged: dict[str, Any] = {**tensors_of(batch)}
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
