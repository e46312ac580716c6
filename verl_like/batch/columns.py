"""The columns of a batch: valid types, names and lengths, and their comparison, union and joining.

A column is a dense `torch.Tensor`, a `RaggedTensor` or a numpy array; dim 0 counts rows. NaN equals
NaN throughout. Nothing here changes its arguments.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from verl_like.batch.memory import join_rows
from verl_like.batch.ragged import RaggedTensor, join_ragged, to_padded
from verl_like.batch.tensordict_import import TensorDict
from verl_like.errors import BatchError, MissingColumnError, nearest

Array = NDArray[Any]


def tensor_columns(batch: TensorDict | None) -> dict[str, torch.Tensor]:
    """Return the tensor columns by name in a new dict, which is empty without a TensorDict."""
    return {} if batch is None else cast(dict[str, torch.Tensor], dict(batch.items()))


def object_rows(rows: Iterable[Any]) -> Array:
    """Return a 1-D object array of these elements; lists of equal length stay lists."""
    listed = list(rows)
    return np.fromiter(listed, dtype=object, count=len(listed))


def as_array(name: str, value: Any) -> Array:
    """Return a numpy column: an array unchanged, a list or tuple as rows of objects."""
    if isinstance(value, np.ndarray) and value.ndim:
        return value
    if isinstance(value, (list, tuple)):
        return object_rows(value)

    is_array = isinstance(value, np.ndarray)
    shown = "an array without rows" if is_array else f"of type {type(value).__name__}"
    raise BatchError(
        f"non-tensor column {name!r} is {shown}. Use a numpy array or a list with one entry per "
        "row."
    )


def check_tensor(name: str, column: Any) -> None:
    """Raise unless the column is a dense tensor with at least one dim."""
    if not isinstance(column, torch.Tensor):
        hint = "use a tensor"
        if isinstance(column, (list, tuple, np.ndarray)):
            hint = "pass lists and arrays as non-tensors"
        raise BatchError(f"tensor column {name!r} is of type {type(column).__name__}: {hint}.")
    if column.is_nested or column.layout != torch.strided or not column.dim():
        layout = "nested" if column.is_nested else f"of layout {column.layout}"
        kind = layout if column.dim() else "without rows"
        raise BatchError(
            f"tensor column {name!r} is {kind}: columns are dense tensors with one entry per row."
        )


def check_lengths(lengths: dict[str, int]) -> None:
    """Raise unless all columns have the same length; `lengths` maps names to lengths."""
    if len(set(lengths.values())) > 1:
        shown = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
        raise BatchError(f"the columns of a batch need the same number of rows: {shown}.")


def known_keys(keys: str | Iterable[str], valid: Iterable[str], kind: str) -> list[str]:
    """Return the requested keys without duplicates; raise at the first key that is not valid."""
    requested = [keys] if isinstance(keys, str) else list(dict.fromkeys(keys))
    have = list(valid)
    for key in requested:
        if key not in have:
            hint = nearest(str(key), have)
            raise MissingColumnError(
                f"no {kind} {key!r}.{hint} The batch has: {', '.join(map(str, have)) or 'none'}."
            )
    return requested


def row_index(index: Any, rows: int) -> NDArray[np.int64]:
    """Return row numbers 0..rows-1 for a list, array or tensor of integers or booleans.

    Negative integers count back from the end; booleans are a mask over all rows.
    """
    flat = index.detach().cpu().numpy() if isinstance(index, torch.Tensor) else np.asarray(index)
    if flat.ndim != 1:
        raise BatchError(
            f"an index of rows has one dim, but this index has {flat.ndim} (shape {flat.shape})."
        )

    if flat.dtype.kind == "b":
        if len(flat) != rows:
            raise BatchError(
                f"a mask over rows needs one entry per row, but this mask has {len(flat)} "
                f"entries for {rows} rows."
            )
        return np.flatnonzero(flat)

    if not len(flat):
        return np.zeros(0, dtype=np.int64)
    if flat.dtype.kind not in "iu":
        raise BatchError(f"rows are selected with integers or booleans, not with {flat.dtype}.")

    outside = np.flatnonzero((flat < -rows) | (flat >= rows))
    if len(outside):
        place = int(outside[0])
        raise BatchError(
            f"row {flat[place]} (entry {place} of the index) does not exist: the batch has {rows} "
            "rows."
        )

    signed = flat.astype(np.int64)
    return np.where(signed < 0, signed + rows, signed)


AnyColumn = torch.Tensor | RaggedTensor | Array


def same_value(left: Any, right: Any) -> bool:
    """Return whether two columns or values of meta_info are equal.

    A ragged column is equal to its rectangle.
    """
    if left is right:
        return True
    if isinstance(left, RaggedTensor) or isinstance(right, RaggedTensor):
        left, right = to_padded(left), to_padded(right)
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if not _same_layout(left, right):
            return False
        if left.is_floating_point() and left.element_size() == 1:
            left, right = left.float(), right.float()  # one-byte floats have no comparison
        close = torch.isclose(left, right.to(left.device), rtol=0, atol=0, equal_nan=True)
        return bool(close.all())
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        if not _same_layout(left, right):
            return False
        if left.dtype != object:
            return np.array_equal(left, right, equal_nan=left.dtype.kind in "fcmM")
        left, right = left.tolist(), right.tolist()
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same_value(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)) and type(left) is type(right):
        return len(left) == len(right) and all(map(same_value, left, right))
    try:
        return bool(left == right) or bool(left != left and right != right)
    except (TypeError, ValueError, RuntimeError):
        return False  # `==` returned no boolean, for example for a list and a tensor


def _same_layout(left: AnyColumn, right: AnyColumn) -> bool:
    """Return whether shape and dtype are equal."""
    return left.shape == right.shape and left.dtype == right.dtype


def _check_same_column(name: str, left: AnyColumn, right: AnyColumn) -> None:
    """Raise if the two sides of a union have different columns of this name."""
    if left is right:
        return
    shapes = f"shapes {tuple(left.shape)} and {tuple(right.shape)}"
    if not _same_layout(left, right):
        raise BatchError(
            f"union: column {name!r} is in both batches, with {shapes}, dtypes {left.dtype} and "
            f"{right.dtype}. Drop one with pop()."
        )
    if same_value(left, right):
        return
    one_row = (slice(row, row + 1) for row in range(len(left)))
    differs = next(row for row in one_row if not same_value(left[row], right[row]))
    raise BatchError(
        f"union: column {name!r} is in both batches ({shapes}) and differs, first in row "
        f"{differs.start}. Drop one with pop()."
    )


def union_columns(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new dict with the columns of both; a column in both must be equal."""
    merged = dict(first)
    for name, column in second.items():
        if name in merged:
            _check_same_column(name, merged[name], column)
        else:
            merged[name] = column
    return merged


def union_meta(first: dict[str, Any], second: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a new dict with the entries of both; an entry in both must be equal."""
    merged = dict(first)
    for key, value in second.items():
        if key in merged and not same_value(merged[key], value):
            shown = f"{reprlib.repr(merged[key])} and {reprlib.repr(value)}"
            raise BatchError(
                f"{where}: meta_info[{key!r}] is {shown}. Make them equal, or drop one with pop()."
            )
        merged.setdefault(key, value)
    return merged


def concat_meta(metas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the union of all dicts, except that `metrics` become one dict of lists.

    A part's metrics are a dict or a list of dicts. The list of a metric has one entry for each dict
    that has this metric, in the order of the parts.
    """
    merged: dict[str, Any] = {}
    metrics: list[dict[str, Any]] = []
    for part, meta in enumerate(metas):
        rest = {key: value for key, value in meta.items() if key != "metrics"}
        merged = union_meta(merged, rest, f"concat, part {part} and the parts before it")
        of_part = meta.get("metrics")
        if not isinstance(of_part, list):
            of_part = [] if of_part is None else [of_part]
        for entry in of_part:
            if not isinstance(entry, dict):
                raise BatchError(
                    f"concat: the metrics of part {part} are {reprlib.repr(entry)}, not a dict or "
                    "list of dicts."
                )
        metrics += of_part

    if metrics:
        lists: dict[str, list[Any]] = {}
        for entry in metrics:
            for name, value in entry.items():
                lists.setdefault(name, []).append(value)
        merged["metrics"] = lists
    return merged


def concat_columns(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the columns of part 0, each with the rows of all parts in order."""
    return {name: _concat_column(name, [part[name] for part in parts]) for name in parts[0]}


def _concat_column(name: str, parts: Sequence[Any]) -> Any:
    """Concatenate one column of all parts; dtypes and the other dims must agree.

    The result is ragged if all parts are ragged and have one fill.
    """
    first = parts[0]
    # arrays of text may differ in width: nothing is lost
    text = isinstance(first, np.ndarray) and first.dtype.kind in "SU"
    for place, part in enumerate(parts[1:], start=1):
        same_type = part.dtype.kind == first.dtype.kind if text else part.dtype == first.dtype
        if not same_type or part.shape[1:] != first.shape[1:]:
            raise BatchError(
                f"concat: column {name!r} is {part.dtype} {tuple(part.shape)} in part {place}, "
                f"but {first.dtype} {tuple(first.shape)} in part 0."
            )

    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    parts = [part if part.device == first.device else part.to(first.device) for part in parts]
    if all(isinstance(part, RaggedTensor) and part.fill == parts[0].fill for part in parts):
        return join_ragged(parts)
    return join_rows([to_padded(part) for part in parts])


def check_same_keys(parts: Sequence[Sequence[str]], kind: str) -> None:
    """Raise unless all parts of a concatenation have the same columns of a kind."""
    for place, keys in enumerate(parts[1:], start=1):
        missing = [key for key in parts[0] if key not in keys]
        extra = [key for key in keys if key not in parts[0]]
        if missing or extra:
            differences = [
                f"{n} {keys}" for n, keys in (("lacks", missing), ("adds", extra)) if keys
            ]
            raise BatchError(
                f"concat: part {place} {' and '.join(differences)}, but all parts need the {kind}s "
                "of part 0."
            )
