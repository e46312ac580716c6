"""verl's functions on whole batches, for drivers and workers that were written for verl.

They collate rows, pad to a divisor, fold a batch dimension, and split a batch by a token budget:

    micro_batches, rows = prepare_dynamic_batch(data, max_token_len=8192)
    outputs = [model(micro_batch) for micro_batch in micro_batches]
    log_probs = restore_dynamic_batch(torch.cat(outputs), rows)

The workers of this project split their batches in `workers.training.microbatch`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from verl_like.batch.columns import object_rows, tensors_of
from verl_like.batch.merge import check_same_keys, union_meta
from verl_like.batch.protocol import DataProto, DataProtoItem
from verl_like.batch.ragged import Column, RaggedTensor, rectangle_of
from verl_like.batch.split import TensorDictRows
from verl_like.batch.tensordict_import import TensorDict
from verl_like.batch.tensordicts import nested_of_ragged, ragged_of_nested
from verl_like.errors import BatchError, MissingColumnError
from verl_like.tensor_ops.balance import get_reverse_idx, get_seqlen_balanced_partitions


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """Return a batch of single rows.

    Values that are not tensors become an object column; entries of `meta_info` must agree.
    """
    if not x:
        raise BatchError("collate_fn got no rows. Pass at least one.")
    tensors = [tensors_of(item.batch) for item in x]
    check_same_keys([list(row) for row in tensors], "tensor column")
    check_same_keys([list(item.non_tensor_batch) for item in x], "non-tensor column")
    meta: dict[str, Any] = {}
    for place, item in enumerate(x):
        where = f"collate_fn, row {place} and the rows before it"
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
    """Return the batch padded to a multiple of `size_divisor`, and the number of added rows.

    The added rows are copies of its first rows.
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
    """Return the batch without its last `pad_size` rows."""
    if not 0 <= pad_size <= len(data):
        raise BatchError(
            f"unpad_dataproto cannot remove {pad_size} rows from a batch of {len(data)}."
        )
    return data[: len(data) - pad_size] if pad_size else data


def fold_batch_dim(data: DataProto, new_batch_size: int) -> DataProto:
    """Return columns of [rows, ...] as [new_batch_size, rows / new_batch_size, ...], copied."""
    rows = len(data)
    if new_batch_size < 1 or rows % new_batch_size:
        raise BatchError(
            f"fold_batch_dim: {rows} rows do not divide into {new_batch_size=} equal groups."
        )
    dims = (new_batch_size, rows // new_batch_size)
    return data.map_columns(
        new_batch_size,
        lambda column: rectangle_of(column).clone().reshape(*dims, *column.shape[1:]),
        lambda array: array.copy().reshape(*dims, *array.shape[1:]),
    )


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """Merge the first `batch_dims` dims of every column into one dim of rows, in a copy."""
    all_columns: dict[str, Any] = {**data.non_tensor_batch, **data.columns}
    leading = {name: tuple(column.shape[:batch_dims]) for name, column in all_columns.items()}
    disagree = len(set(leading.values())) > 1
    if batch_dims < 1 or disagree or any(len(dims) < batch_dims for dims in leading.values()):
        raise BatchError(
            f"unfold_batch_dim needs columns with the same first {batch_dims} dims, not {leading}."
        )
    rows = math.prod(next(iter(leading.values()), (0,)))
    return data.map_columns(
        rows,
        lambda column: rectangle_of(column).clone().reshape(rows, *column.shape[batch_dims:]),
        lambda array: array.copy().reshape(rows, *array.shape[batch_dims:]),
    )


# ------------------------------------------------------------- a batch cut by a budget of tokens

Partitions = list[list[int]]
"""The row numbers of each micro-batch."""


def rearrange_micro_batches(
    batch: TensorDict,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[TensorDict], Partitions]:
    """Return micro-batches of at most `max_token_len` tokens, and the row numbers of each.

    Tokens are counted by `attention_mask`, or by nested `input_ids`. No micro-batch is empty, and
    token counts are balanced.

    Args:
        batch: a TensorDict with one batch dim.
        max_token_len: the maximum number of tokens of a micro-batch.
        dp_group: its ranks get the same number of micro-batches, unless `same_micro_num_in_dp` is
            False.
        num_batches_divided_by: the number of micro-batches is a multiple of this.
        same_micro_num_in_dp: see `dp_group`.
        min_num_micro_batch: the minimum number of micro-batches.
        use_dynamic_bsz_balance: put the lightest micro-batches first and last, the heaviest in the
            middle.
        force_group_size: this many consecutive rows stay together.
    """
    converted = TensorDictRows.of(batch)
    lengths = _token_counts(converted.columns)
    if force_group_size < 1 or len(lengths) % force_group_size:
        raise BatchError(
            f"{len(lengths)} rows do not divide into groups of force_group_size={force_group_size}."
        )
    groups = [
        range(first, first + force_group_size) for first in range(0, len(lengths), force_group_size)
    ]
    tokens = [sum(lengths[row] for row in group) for group in groups]
    if not tokens:
        raise BatchError("a batch without rows cannot be split into micro-batches.")
    heaviest = max(tokens)
    if heaviest > max_token_len:
        raise BatchError(
            f"max_token_len={max_token_len} is below the {heaviest} tokens of the longest row (or "
            f"group of {force_group_size}) of {len(lengths)} rows. Use {heaviest} or more."
        )

    in_step = dp_group if same_micro_num_in_dp else None
    least = max(min_num_micro_batch or 1, -(-sum(tokens) // max_token_len))
    parts = _partition(tokens, max_token_len, least, num_batches_divided_by or 1, in_step)
    if use_dynamic_bsz_balance:
        parts = _lightest_outside(parts, tokens)
    rows = [list(chain.from_iterable(groups[place] for place in part)) for part in parts]
    return [converted.select_idxs(picked).to_tensordict() for picked in rows], rows


def prepare_dynamic_batch(
    data: DataProto,
    max_token_len: int,
    dp_group: dist.ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
) -> tuple[list[DataProto], Partitions]:
    """Return micro-batches of at most `max_token_len` tokens, and the row numbers of each.

    Tokens are counted by `attention_mask`. Micro-batches have all columns and meta entries of the
    batch. For the arguments see `rearrange_micro_batches`.
    """
    if "attention_mask" not in data.columns:
        raise MissingColumnError("prepare_dynamic_batch needs the tensor column 'attention_mask'.")
    _, rows = rearrange_micro_batches(
        TensorDict({"attention_mask": data.padded("attention_mask")}, batch_size=[len(data)]),
        max_token_len,
        dp_group,
        num_batches_divided_by,
        same_micro_num_in_dp,
        min_num_micro_batch,
        use_dynamic_bsz_balance,
    )
    return [data.select_idxs(picked) for picked in rows], rows


def restore_dynamic_batch(
    data: torch.Tensor, batch_idx_list: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Reorder the concatenated results of the micro-batches to the order of the batch's rows."""
    order = list(chain.from_iterable(batch_idx_list))
    if sorted(order) != list(range(data.shape[0])):
        raise BatchError(
            f"restore_dynamic_batch got {data.shape[0]} rows, but index lists of "
            f"{len(order)} rows: it needs the results of all micro-batches, with every "
            "row once."
        )
    places = get_reverse_idx(order)
    if data.is_nested:
        ragged = ragged_of_nested("results", data).index_select(0, torch.tensor(places))
        return nested_of_ragged(ragged)
    return data[torch.tensor(places, device=data.device)]


def _token_counts(columns: dict[str, Column]) -> list[int]:
    ids = columns.get("input_ids")
    if isinstance(ids, RaggedTensor):
        sizes: list[int] = ids.lengths.tolist()
        return sizes
    if "attention_mask" not in columns:
        raise MissingColumnError(
            "micro-batches by tokens need the column 'attention_mask', or nested 'input_ids'. The "
            f"batch has: {', '.join(columns) or 'none'}."
        )
    counts: list[int] = rectangle_of(columns["attention_mask"]).long().sum(dim=1).tolist()
    return counts


def _partition(
    tokens: list[int], limit: int, least: int, multiple: int, group: dist.ProcessGroup | None
) -> Partitions:
    """Return balanced sets within the limit; their number, small and equal on all ranks, grows
    from `least`.
    """
    wanted = least
    while True:
        count = -(-_maximum(wanted, group) // multiple) * multiple
        if count > len(tokens):
            raise BatchError(
                f"{count} micro-batches cannot be made of {len(tokens)} rows (or groups), because "
                "none may be empty. Lower min_num_micro_batch or num_batches_divided_by, or raise "
                "max_token_len."
            )
        parts = get_seqlen_balanced_partitions(tokens, count)
        fits = all(sum(tokens[place] for place in part) <= limit for part in parts)
        wanted = count if fits else count + 1
        if _maximum(wanted, group) == count:
            return parts


def _maximum(number: int, group: dist.ProcessGroup | None) -> int:
    """Return the largest number among the ranks."""
    if group is None or not dist.is_initialized():
        return number
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    largest = torch.tensor([number], device=device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group)
    return int(largest.item())


def _lightest_outside(parts: Partitions, tokens: list[int]) -> Partitions:
    """Order the parts with the heaviest in the middle and lighter ones alternating around it."""
    ordered: deque[list[int]] = deque()
    heaviest_first = sorted(parts, key=lambda part: -sum(tokens[place] for place in part))
    for position, part in enumerate(heaviest_first):
        if position % 2:
            ordered.append(part)
        else:
            ordered.appendleft(part)
    return list(ordered)
