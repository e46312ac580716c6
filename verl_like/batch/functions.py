"""verl's functions on whole batches: collating rows, padding to a divisor, folding a batch dim."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from verl_like.batch.columns import object_rows, tensors_of
from verl_like.batch.merge import check_same_keys, union_meta
from verl_like.batch.protocol import DataProto, DataProtoItem
from verl_like.batch.ragged import rectangle_of
from verl_like.batch.tensordict_import import TensorDict
from verl_like.errors import BatchError


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """A batch of single rows.

    What is not a tensor becomes an object column; entries of `meta_info` must agree.
    """
    if not x:
        raise BatchError("collate_fn got no rows.")
    tensors = [tensors_of(item.batch) for item in x]
    check_same_keys([list(row) for row in tensors], "tensor column")
    check_same_keys([list(item.non_tensor_batch) for item in x], "non-tensor column")
    meta: dict[str, Any] = {}
    for place, item in enumerate(x):
        where = f"collate_fn, row {place} and those before it"
        meta = union_meta(meta, item.meta_info, where)

    batch = None
    if x[0].batch is not None:
        stacked = {name: torch.stack([row[name] for row in tensors]) for name in tensors[0]}
        batch = TensorDict(stacked, batch_size=[len(x)])
    arrays = {}
    for name in x[0].non_tensor_batch:
        arrays[name] = object_rows(item.non_tensor_batch[name] for item in x)
    return DataProto(batch, arrays, meta)


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """The batch filled up to a multiple of `size_divisor`, and how many rows were added.

    They are copies of its own rows, from the front.
    """
    if size_divisor < 1:
        raise BatchError(
            f"pad_dataproto_to_divisor needs a divisor of at least 1, not {size_divisor}."
        )
    pad_size = -len(data) % size_divisor
    if not pad_size:
        return data, 0
    return data.select_idxs(np.arange(len(data) + pad_size) % len(data)), pad_size


def unpad_dataproto(data: DataProto, pad_size: int) -> DataProto:
    """The batch without its last `pad_size` rows."""
    if not 0 <= pad_size <= len(data):
        raise BatchError(f"unpad_dataproto cannot take {pad_size} rows off a batch of {len(data)}.")
    return data[: len(data) - pad_size] if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Columns of [rows, ...] as [new_batch_size, rows / new_batch_size, ...], copied."""
    rows = len(data)
    if new_batch_size < 1 or rows % new_batch_size:
        raise BatchError(f"fold_batch_dim: {rows} rows do not divide into {new_batch_size}.")
    dims = (new_batch_size, rows // new_batch_size)
    return data.map_columns(
        new_batch_size,
        lambda column: rectangle_of(column).clone().reshape(*dims, *column.shape[1:]),
        lambda array: array.copy().reshape(*dims, *array.shape[1:]),
    )


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """The first `batch_dims` dims of every column become one, rows, copied."""
    all_columns: dict[str, Any] = {**data.non_tensor_batch, **data.columns}
    leading = {name: tuple(column.shape[:batch_dims]) for name, column in all_columns.items()}
    disagree = len(set(leading.values())) > 1
    if batch_dims < 1 or disagree or any(len(dims) < batch_dims for dims in leading.values()):
        raise BatchError(
            f"unfold_batch_dim needs columns that agree in their first {batch_dims} dims, not "
            f"{leading}."
        )
    rows = math.prod(next(iter(leading.values()), (0,)))
    return data.map_columns(
        rows,
        lambda column: rectangle_of(column).clone().reshape(rows, *column.shape[batch_dims:]),
        lambda array: array.copy().reshape(rows, *array.shape[batch_dims:]),
    )
