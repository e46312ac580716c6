"""What happens to the columns of a batch: building, indexing, comparing, merging, concatenating
them.

A column is either a dense `torch.Tensor` or a numpy array; dim 0 counts rows. Nothing here changes
its arguments. `verl_like.batch` builds every `DataProto` method from these functions; error
messages name the column they are about.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from verl_like.batch.memory import join_rows
from verl_like.batch.tensordicts import TensorDict
from verl_like.errors import BatchError, MissingColumnError, nearest

Array = NDArray[Any]


def tensors_of(batch: TensorDict | None) -> dict[str, torch.Tensor]:
    """The tensor columns by name, in a dict of their own; none if there is no TensorDict."""
    return {} if batch is None else cast(dict[str, torch.Tensor], dict(batch.items()))


def object_rows(rows: Iterable[Any]) -> Array:
    """A 1-D object array with one row per element, whatever the elements are (equal-length lists
    stay lists).
    """
    listed = list(rows)
    return np.fromiter(listed, dtype=object, count=len(listed))


def as_array(name: str, value: Any) -> Array:
    """A numpy column out of what the caller gave: an array as it is, a list or tuple as rows of
    objects.
    """
    if isinstance(value, np.ndarray) and value.ndim:
        return value
    if isinstance(value, (list, tuple)):
        return object_rows(value)
    shown = (
        "an array without rows"
        if isinstance(value, np.ndarray)
        else f"of type {type(value).__name__}"
    )
    raise BatchError(
        f"Non-tensor column {name!r} is {shown}: give a numpy array or a list with one entry per "
        "row."
    )


def check_tensor(name: str, column: Any) -> None:
    """Raise unless it is a dense tensor with rows."""
    if not isinstance(column, torch.Tensor):
        hint = (
            "give lists and arrays as non-tensors"
            if isinstance(column, (list, tuple, np.ndarray))
            else "give a tensor"
        )
        raise BatchError(f"Tensor column {name!r} is of type {type(column).__name__}: {hint}.")
    if column.is_nested or column.layout != torch.strided or not column.dim():
        kind = "without rows" if not column.dim() else f"of layout {column.layout}"
        raise BatchError(
            f"Tensor column {name!r} is {kind}: columns are dense tensors with one entry per row."
        )


def check_lengths(lengths: dict[str, int]) -> None:
    """Raise when the columns, given by name and length, are not all equally long."""
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
        raise BatchError(f"Columns of one batch need the same number of rows: {shown}.")


def known_keys(keys: str | Iterable[str], valid: Iterable[str], kind: str) -> list[str]:
    """The wanted keys without duplicates; raise for the first that is not among the valid ones."""
    wanted = [keys] if isinstance(keys, str) else list(dict.fromkeys(keys))
    have = list(valid)
    for key in wanted:
        if key not in have:
            hint = nearest(str(key), have)
            raise MissingColumnError(
                f"No {kind} {key!r}.{hint} The batch has: {', '.join(map(str, have)) or 'none'}."
            )
    return wanted


def row_index(index: Any, rows: int) -> NDArray[np.int64]:
    """Row numbers 0..rows-1 out of a list, array or tensor of integers (negative ones count back)
    or of booleans.
    """
    flat = index.detach().cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
    if flat.ndim != 1:
        raise BatchError(
            f"An index of rows has one dim, this one has {flat.ndim} (shape {flat.shape})."
        )
    if flat.dtype.kind == "b":
        if len(flat) != rows:
            raise BatchError(
                f"A mask over rows needs one entry per row: {len(flat)} entries for {rows} rows."
            )
        return np.flatnonzero(flat)
    if not len(flat):
        return np.zeros(0, dtype=np.int64)
    if flat.dtype.kind not in "iu":
        raise BatchError(f"Rows are picked by integers or booleans, not by {flat.dtype}.")
    outside = np.flatnonzero((flat < -rows) | (flat >= rows))
    if len(outside):
        place = int(outside[0])
        raise BatchError(
            f"Row {flat[place]} (entry {place} of the index) does not exist: the batch has {rows} "
            "rows."
        )
    signed = flat.astype(np.int64)
    return np.where(signed < 0, signed + rows, signed)


def same_value(left: Any, right: Any) -> bool:
    """Whether two objects are equal, looking into containers,
    tensors and arrays; NaN equals NaN.
    """
    if left is right:
        return True
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return _same_layout(left, right) and (
            not left.numel() or not bool(_unequal(left, right).any())
        )
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return (
            _same_layout(left, right)
            and first_differing_row(left.reshape(-1), right.reshape(-1)) is None
        )
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(
            same_value(left[key], right[key]) for key in left
        )
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return (
            type(left) is type(right)
            and len(left) == len(right)
            and all(map(same_value, left, right))
        )
    if isinstance(left, float) and isinstance(right, float) and left != left and right != right:
        return True
    try:
        return bool(left == right)
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ):  # an `==` without a yes or no, such as list against tensor
        return False


def first_differing_row(left: torch.Tensor | Array, right: torch.Tensor | Array) -> int | None:
    """The first row in which two columns of one shape and dtype differ, or None; NaN equals NaN."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if not left.numel():
            return None
        unequal = _unequal(left, right)
        rows = unequal.flatten(1).any(1) if unequal.dim() > 1 else unequal
        return int(rows.nonzero()[0, 0]) if bool(rows.any()) else None
    left, right = np.asarray(left), np.asarray(right)
    if left.dtype == object:
        return next(
            (
                row
                for row, pair in enumerate(zip(left, right, strict=True))
                if not same_value(*pair)
            ),
            None,
        )
    different = np.asarray(left != right)
    if left.dtype.kind in "fcmM":
        different &= ~(np.asarray(left != left) & np.asarray(right != right))
    found = np.argwhere(different)
    return int(found[0, 0]) if len(found) else None


def _same_layout(left: torch.Tensor | Array, right: torch.Tensor | Array) -> bool:
    """Equal shape and dtype."""
    return left.shape == right.shape and left.dtype == right.dtype


def _unequal(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Element by element; one-byte floats have no comparison of their own."""
    right = right.to(left.device)
    if left.is_floating_point() and left.element_size() == 1:
        left, right = left.float(), right.float()
    different = left != right
    if left.is_floating_point() or left.is_complex():
        different &= ~((left != left) & (right != right))
    return different


def _check_same_column(name: str, left: torch.Tensor | Array, right: torch.Tensor | Array) -> None:
    """Raise when a column that both sides of a union have is not the same one."""
    if left is right:
        return
    shapes = f"shapes {tuple(left.shape)} and {tuple(right.shape)}"
    if not _same_layout(left, right):
        raise BatchError(
            f"Union: column {name!r} is in both batches, with {shapes}, dtypes {left.dtype} and "
            f"{right.dtype}."
        )
    row = first_differing_row(left, right)
    if row is not None:
        raise BatchError(
            f"Union: column {name!r} is in both batches ({shapes}) and differs, first in row {row}."
        )


def union_tensor_dict(tensor_dict1: TensorDict, tensor_dict2: TensorDict) -> TensorDict:
    """A new TensorDict with the columns of both; a column in both
    must be equal (NaN equals NaN).
    """
    if tensor_dict1.batch_size != tensor_dict2.batch_size:
        sizes = f"{tuple(tensor_dict1.batch_size)} and {tuple(tensor_dict2.batch_size)}"
        raise BatchError(f"Union: the batches have different batch sizes, {sizes}.")
    merged = tensors_of(tensor_dict1)
    for name, column in tensors_of(tensor_dict2).items():
        if name in merged:
            _check_same_column(name, merged[name], column)
        else:
            merged[name] = column
    return TensorDict(merged, batch_size=tensor_dict1.batch_size, device=tensor_dict1.device)


def union_numpy_dict(
    tensor_dict1: dict[str, Array], tensor_dict2: dict[str, Array]
) -> dict[str, Array]:
    """A new dict with the columns of both; a column in both must be equal (NaN equals NaN)."""
    merged = dict(tensor_dict1)
    for name, column in tensor_dict2.items():
        if name in merged:
            _check_same_column(name, merged[name], column)
        else:
            merged[name] = column
    return merged


def union_meta(first: dict[str, Any], second: dict[str, Any], where: str) -> dict[str, Any]:
    """A new dict with the entries of both; an entry in both must be equal."""
    merged = dict(first)
    for key, value in second.items():
        if key in merged and not same_value(merged[key], value):
            shown = f"{reprlib.repr(merged[key])} and {reprlib.repr(value)}"
            raise BatchError(
                f"{where}: meta_info[{key!r}] is {shown}. Make them equal or drop one with pop()."
            )
        merged.setdefault(key, value)
    return merged


def concat_meta(metas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The union of all, except that `metrics` (a dict per part, or a list of dicts) become one dict
    of lists.

    The list under a metric has one entry for each dict that has this metric, in the order of the
    parts.
    """
    merged: dict[str, Any] = {}
    metrics: list[dict[str, Any]] = []
    for part, meta in enumerate(metas):
        rest = {key: value for key, value in meta.items() if key != "metrics"}
        merged = union_meta(merged, rest, f"Concat, part {part} and those before it")
        found = meta.get("metrics")
        entries = [] if found is None else found if isinstance(found, list) else [found]
        wrong = next((entry for entry in entries if not isinstance(entry, dict)), None)
        if wrong is not None:
            raise BatchError(
                f"Concat: the metrics of part {part} are {reprlib.repr(wrong)}, not a dict or "
                "list of dicts."
            )
        metrics.extend(entries)
    if metrics:
        names = dict.fromkeys(name for entry in metrics for name in entry)
        merged["metrics"] = {
            name: [entry[name] for entry in metrics if name in entry] for name in names
        }
    return merged


def concat_column(name: str, parts: Sequence[Any]) -> Any:
    """The rows of all parts of one column, in order; dtypes and the other dims must agree."""
    first = parts[0]
    text = (
        isinstance(first, np.ndarray) and first.dtype.kind in "SU"
    )  # widths may differ, nothing is lost
    for place, part in enumerate(parts[1:], start=1):
        same_type = part.dtype.kind == first.dtype.kind if text else part.dtype == first.dtype
        if not same_type or part.shape[1:] != first.shape[1:]:
            raise BatchError(
                f"Concat: column {name!r} is {part.dtype} {tuple(part.shape)} in part {place}, "
                f"but {first.dtype} {tuple(first.shape)} in part 0."
            )
    if isinstance(first, torch.Tensor):
        return join_rows([part.to(first.device) for part in parts])
    return np.concatenate(parts)


def check_same_keys(parts: Sequence[Sequence[str]], kind: str) -> None:
    """Raise when the parts of a concat do not have the same columns of a kind."""
    for place, keys in enumerate(parts[1:], start=1):
        missing = [key for key in parts[0] if key not in keys]
        extra = [key for key in keys if key not in parts[0]]
        if missing or extra:
            raise BatchError(
                f"Concat: part {place} lacks {kind}s {missing} of part 0, and has {extra} in "
                "addition."
            )
