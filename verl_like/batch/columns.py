"""The columns of a batch: valid types, names, lengths and row numbers.

A column is a dense `torch.Tensor`, a `RaggedTensor` or a numpy array; dim 0 counts rows. Nothing
here changes its arguments.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

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
    """Return the wanted keys without duplicates; raise at the first key that is not valid."""
    wanted = [keys] if isinstance(keys, str) else list(dict.fromkeys(keys))
    have = list(valid)
    for key in wanted:
        if key not in have:
            hint = nearest(str(key), have)
            raise MissingColumnError(
                f"no {kind} {key!r}.{hint} The batch has: {', '.join(map(str, have)) or 'none'}."
            )
    return wanted


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
