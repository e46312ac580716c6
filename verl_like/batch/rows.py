"""The methods of a batch that pick, chunk, order, repeat and iterate rows; all copy them.

A slice that shared memory with its parent would let a write into a mini-batch change the batch, and
would keep a whole batch alive for one row of it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Self, overload

import numpy as np
import torch
from torch.utils.data import DataLoader

from verl_like.batch import columns
from verl_like.batch.columns import Array
from verl_like.batch.parts import BatchParts, DataProtoItem
from verl_like.batch.tensordict_import import TensorDict
from verl_like.errors import BatchError

_Slice = slice  # the class below has a method of this name


class BatchRows(BatchParts):
    """The row half of `DataProto`'s methods."""

    @overload
    def __getitem__(self, item: int) -> DataProtoItem: ...
    @overload
    def __getitem__(self, item: _Slice | list[Any] | Array | torch.Tensor) -> Self: ...
    def __getitem__(self, item: Any) -> Any:
        """A row by number; rows by slice, list, array or tensor of numbers, or boolean mask."""
        if isinstance(item, _Slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, (list, np.ndarray, torch.Tensor)):
            return self.select_idxs(item)
        if isinstance(item, bool) or not isinstance(item, (int, np.integer)):
            raise TypeError(
                "A batch is indexed by int, slice, list, array or tensor, not by "
                f"{type(item).__name__}."
            )
        return self._row(int(item))

    def _row(self, row: int) -> DataProtoItem:
        rows = len(self)
        if not -rows <= row < rows:
            raise IndexError(f"Row {row} does not exist: the batch has {rows} rows.")

        batch = None
        if self.batch is not None:
            tensors = columns.tensors_of(self.batch)
            copies = {name: column[row].clone() for name, column in tensors.items()}
            batch = TensorDict(copies, batch_size=[])
        arrays = {
            name: copy.copy(a[row]) if a.ndim > 1 else a[row]
            for name, a in self.non_tensor_batch.items()
        }
        return DataProtoItem(batch, arrays, dict(self.meta_info))

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> Self:
        """Rows as `data[start:end:step]` picks them."""
        picked = range(*_Slice(start, end, step).indices(len(self)))
        if picked.step != 1:
            return self.select_idxs(list(picked))
        rows = _Slice(picked.start, picked.stop)
        return self.map_columns(
            len(picked), lambda column: column[rows].clone(), lambda array: array[rows].copy()
        )

    def select_idxs(self, idxs: Sequence[Any] | Array | torch.Tensor) -> Self:
        """Rows by numbers (repeats allowed, negative ones count back) or by a boolean mask."""
        rows = columns.row_index(idxs, len(self))
        index = torch.from_numpy(rows)
        return self.map_columns(
            len(rows),
            lambda column: column.index_select(0, index.to(column.device)),
            lambda array: array[rows],
        )

    def reorder(self, indices: Sequence[int] | Array | torch.Tensor) -> Self:
        """Bring the rows into another order, in place: new row i is old row `indices[i]`."""
        rows = columns.row_index(indices, len(self))
        if not np.array_equal(np.sort(rows), np.arange(len(self))):
            raise BatchError(
                f"reorder needs each of the {len(self)} rows once; select_idxs() makes any other "
                "pick."
            )
        return self._take_columns(self.select_idxs(rows))

    def _take_columns(self, other: BatchParts) -> Self:
        """Replace the columns by those of another batch; the shard's facts no longer hold."""
        self.batch, self.non_tensor_batch, self.shard = other.batch, other.non_tensor_batch, None
        return self

    def chunk(self, chunks: int) -> list[Self]:
        """This many parts; sizes differ by one at most, and longer ones come first.

        Parts are empty when rows run out.
        """
        if chunks < 1:
            raise BatchError(f"chunk needs at least 1 part, not {chunks}.")
        size, longer = divmod(len(self), chunks)
        bounds = [part * size + min(part, longer) for part in range(chunks + 1)]
        return [self.slice(start, end) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]

    def split(self, split_size: int) -> list[Self]:
        """Parts of this many rows, the last maybe shorter; none of a batch without rows."""
        if split_size < 1:
            raise BatchError(f"split needs parts of at least 1 row, not {split_size}.")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Each row this often: aabb, or with `interleave=False` abab.

        Objects are shared by the copies of a row.
        """
        if repeat_times < 0:
            raise BatchError(f"repeat needs a count of at least 0, not {repeat_times}.")
        rows = len(self) * repeat_times
        if interleave:
            each = partial(_repeat, times=repeat_times)
            return self.map_columns(rows, each, each)
        return self.map_columns(
            rows,
            lambda column: column.repeat(repeat_times, *[1] * (column.dim() - 1)),
            lambda array: np.tile(array, (repeat_times, *[1] * (array.ndim - 1))),
        )

    def sample_level_repeat(self, repeat_times: Sequence[int] | Array | torch.Tensor) -> Self:
        """Row i `repeat_times[i]` times, one after the other; 0 drops the row."""
        if isinstance(repeat_times, torch.Tensor):
            repeat_times = repeat_times.cpu().numpy()
        counts = np.asarray(repeat_times)
        if not counts.size:
            counts = counts.astype(np.int64)  # an empty list has numpy's default, float
        if counts.shape != (len(self),) or counts.dtype.kind not in "iu" or (counts < 0).any():
            raise BatchError(
                f"sample_level_repeat needs one count of at least 0 for each of the {len(self)} "
                f"rows, not {counts.dtype} values of shape {counts.shape}."
            )
        return self.select_idxs(np.arange(len(self)).repeat(counts))

    def unfold_column_chunks(self, n_split: int, split_keys: Sequence[str] | None = None) -> Self:
        """Cut dim 1 of these columns into `n_split` chunks that become rows.

        Of a column of lists each list is cut. Rows of the other columns are repeated.
        """
        if n_split < 1:
            raise BatchError(f"unfold_column_chunks needs at least 1 chunk, not {n_split}.")
        tensors = columns.tensors_of(self.batch)
        wanted = columns.known_keys(split_keys or (), [*tensors, *self.non_tensor_batch], "column")

        def unfold(name: str, column: Any) -> Any:
            return _cut_dim_1(name, column, n_split) if name in wanted else _repeat(column, n_split)

        batch = None
        if self.batch is not None:
            unfolded = {name: unfold(name, column) for name, column in tensors.items()}
            batch = TensorDict(unfolded, batch_size=[len(self) * n_split], device=self.batch.device)
        arrays = {name: unfold(name, array) for name, array in self.non_tensor_batch.items()}
        return type(self)(batch, arrays, self.meta_info)

    def padding(self, padding_size: int, padding_candidate: str = "") -> Self:
        """Append copies of the last row, or of the "first" one, in place."""
        if padding_candidate not in ("", "last", "first") or padding_size < 0:
            raise BatchError(
                f"padding by {padding_size} x {padding_candidate!r}: use a count >= 0, 'last' or "
                "'first'."
            )
        if not padding_size:
            return self
        if not len(self):
            raise BatchError("padding of a batch without rows: there is no row to copy.")
        source = 0 if padding_candidate == "first" else len(self) - 1
        return self._take_columns(self.select_idxs([*range(len(self)), *[source] * padding_size]))

    def make_iterator(
        self,
        mini_batch_size: int,
        epochs: int,
        seed: int | None = None,
        dataloader_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[Self]:
        """Mini-batches of this many rows, `epochs` times over.

        `dataloader_kwargs={"shuffle": True}` shuffles them by `seed`.
        """
        rows = len(self)
        if mini_batch_size < 1 or rows % mini_batch_size:
            valid = [size for size in range(1, rows + 1) if rows % size == 0]
            raise BatchError(
                f"A mini-batch size of {mini_batch_size} does not divide {rows} rows; these do: "
                f"{valid}."
            )
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        numbers: Any = range(rows)
        loader: DataLoader[Any] = DataLoader(
            numbers,
            mini_batch_size,
            collate_fn=self.select_idxs,
            generator=generator,
            **(dataloader_kwargs or {}),
        )
        return (mini_batch for _ in range(epochs) for mini_batch in loader)


def _repeat(column: Any, times: int) -> Any:
    """Every row this often, aabb."""
    if isinstance(column, torch.Tensor):
        return column.repeat_interleave(times, 0)
    return column.repeat(times, 0)


def _cut_list(what: str, value: Any, num_chunks: int) -> list[Any]:
    """A list, tuple or array in chunks of its kind."""
    if not isinstance(value, (list, tuple, np.ndarray)) or len(value) % num_chunks:
        shown = f"of {len(value)}" if hasattr(value, "__len__") else repr(value)
        raise BatchError(
            f"{what} is a {type(value).__name__} {shown}: it does not divide into {num_chunks} "
            "chunks."
        )
    size = len(value) // num_chunks
    return [value[start : start + size] for start in range(0, size * num_chunks, size or 1)]


def _cut_dim_1(name: str, column: Any, num_chunks: int) -> Any:
    """Dim 1 in chunks that are rows, in memory of its own."""
    if isinstance(column, np.ndarray) and column.ndim == 1 and column.dtype == object:
        return columns.object_rows(
            chunk
            for row, value in enumerate(column)
            for chunk in _cut_list(f"Row {row} of column {name!r}", value, num_chunks)
        )
    if column.ndim < 2 or column.shape[1] % num_chunks:
        raise BatchError(
            f"Dim 1 of column {name!r} (shape {tuple(column.shape)}) does not divide into "
            f"{num_chunks} chunks."
        )
    rows, width, *others = column.shape
    copied = column.clone() if isinstance(column, torch.Tensor) else column.copy()
    return copied.reshape(rows * num_chunks, width // num_chunks, *others)
