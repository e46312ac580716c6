"""What a batch is: its three parts, its place in a split batch, and the rules they keep.

`verl_like.batch.rows` adds the methods that pick rows, and `verl_like.batch.protocol` those on
columns and the name `DataProto`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch

from verl_like.batch import columns
from verl_like.batch.columns import Array
from verl_like.batch.tensordict_import import TensorDict
from verl_like.errors import BatchError


@dataclass(frozen=True)
class Shard:
    """Which rows of a split batch a worker's piece holds."""

    index: int
    """Number of this piece, 0..count-1."""
    count: int
    """How many pieces the batch was split into."""
    start: int
    """Global row number of this piece's row 0."""
    rows: int
    """Rows of this piece that are real; the rows after them are padding."""
    total: int
    """Real rows of the whole batch."""


@dataclass
class DataProtoItem:
    """One row of a batch, as `data[3]` returns it; `collate_fn` makes a batch of several."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class BatchParts:
    """The fields of a `DataProto`, checked when it is made."""

    batch: TensorDict | None = None
    """Dense tensors with one batch dim, rows."""
    non_tensor_batch: dict[str, Array] = field(default_factory=dict)
    """Numpy arrays, mostly 1-D and of objects; dim 0 counts rows."""
    meta_info: dict[str, Any] = field(default_factory=dict)
    """Facts about all rows."""
    shard: Shard | None = field(default=None, kw_only=True)
    """Set on the piece that a worker gets when a group splits a batch.

    Batches derived from the piece have none.
    """

    def __post_init__(self) -> None:
        """Copy the dicts, so that the caller's later changes do not show here; then check."""
        arrays = self.non_tensor_batch or {}
        self.non_tensor_batch = {
            name: columns.as_array(name, column) for name, column in arrays.items()
        }
        self.meta_info = dict(self.meta_info or {})
        self.check_consistency()

    def check_consistency(self) -> None:
        """Raise unless all columns are dense, named by strings and equally long.

        The TensorDict has one batch dim.
        """
        lengths = {}
        if self.batch is not None:
            self._check_tensors(self.batch)
            lengths["batch (its tensors)"] = len(self)
        for name, array in self.non_tensor_batch.items():
            if not isinstance(name, str) or not isinstance(array, np.ndarray) or not array.ndim:
                raise BatchError(
                    f"Non-tensor column {name!r} is not a numpy array with rows, or not named by "
                    "a string."
                )
            lengths[name] = len(array)
        columns.check_lengths(lengths)

    @staticmethod
    def _check_tensors(batch: Any) -> None:
        if not isinstance(batch, TensorDict):
            raise BatchError(
                f"batch is a {type(batch).__name__}, not a TensorDict: use from_dict()."
            )
        if len(batch.batch_size) != 1:
            raise BatchError(
                f"A batch has one batch dim, not batch_size {tuple(batch.batch_size)}."
            )
        for name, column in columns.tensors_of(batch).items():
            columns.check_tensor(name, column)

    def __len__(self) -> int:
        """Number of rows, padding included."""
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        return len(next(iter(self.non_tensor_batch.values()), ()))

    def __repr__(self) -> str:
        """Rows, columns and meta keys on one line."""
        names = ", ".join([*columns.tensors_of(self.batch), *self.non_tensor_batch])
        meta = ", ".join(map(str, self.meta_info))
        return (
            f"{type(self).__name__}({len(self)} rows; columns: {names or 'none'}; meta: "
            f"{meta or 'none'})"
        )

    @property
    def num_real_rows(self) -> int:
        """Rows that are not padding put in by dispatch."""
        return len(self) if self.shard is None else self.shard.rows

    @property
    def pad_mask(self) -> torch.Tensor:
        """[rows] bool, True for the rows that dispatch put in to fill the batch up."""
        return torch.arange(len(self)) >= self.num_real_rows

    def is_padding_enabled(self) -> bool:
        """Whether dispatch pads a batch that does not divide: here always (verl has a switch)."""
        return True

    def get_data_info(self) -> str:
        """A line per column and meta entry: name, shape, dtype, device."""
        lines = ["batch"]
        for name, column in columns.tensors_of(self.batch).items():
            lines.append(f"  {name}: {tuple(column.shape)} {column.dtype} on {column.device}")
        lines.append("non_tensor_batch")
        for name, array in self.non_tensor_batch.items():
            lines.append(f"  {name}: {array.shape} {array.dtype}")
        lines.append("meta_info")
        for key, value in self.meta_info.items():
            lines.append(f"  {key}: {type(value).__name__}")
        return "\n".join(lines)

    def print_size(self, prefix: str = "") -> None:
        """Print how many GiB the columns hold (of objects, only the references)."""
        tensors = sum(column.nbytes for column in columns.tensors_of(self.batch).values())
        arrays = sum(array.nbytes for array in self.non_tensor_batch.values())
        start = f"{prefix}, " if prefix else ""
        print(f"{start}tensors {tensors / 2**30:.4f} GiB, arrays {arrays / 2**30:.4f} GiB")

    def map_columns(
        self,
        rows: int,
        on_tensor: Callable[[torch.Tensor], torch.Tensor],
        on_array: Callable[[Array], Array],
    ) -> Self:
        """A new batch of this many rows, made by one function of tensors and one of arrays."""
        batch = None
        if self.batch is not None:
            changed = {
                name: on_tensor(column) for name, column in columns.tensors_of(self.batch).items()
            }
            batch = TensorDict(changed, batch_size=[rows], device=self.batch.device)
        arrays = {name: on_array(array) for name, array in self.non_tensor_batch.items()}
        return type(self)(batch, arrays, self.meta_info)
