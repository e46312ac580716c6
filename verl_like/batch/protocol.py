"""`DataProto`, the batch that every role method takes and returns (with verl's names).

It has tensor columns and `non_tensor_batch` (numpy arrays, mostly of objects), aligned by rows, and
`meta_info` (a dict about the whole batch):

    data = DataProto.from_dict({"input_ids": ids}, {"uid": ["0-0", "1-0"]}, {"temperature": 1.0})
    data.union(workers.compute_scores(data))    # adds the columns that the workers return
    for mini_batch in data.split(64): ...

A tensor column is dense, or `RaggedTensor`: rows of different lengths without their padding.

    data.column("responses"), data.columns      # as stored: a Tensor or a RaggedTensor
    data.padded("responses")                    # the rectangle; a copy if the column is ragged
    data.set_columns({"advantages": column})
    data.batch["responses"]                     # verl's layout: see `batch`

`union`, `rename`, `reorder`, `padding`, `set_columns` and `to` change the batch in place and return
it. `pop` also changes it, and returns what it removed. All other methods change neither the batch
nor the caller's containers. Selecting rows copies them, except in `views`: if a slice shared memory
with its parent, a write into a mini-batch would change the batch, and one row would keep a whole
batch alive. Selecting columns shares them.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar, cast, overload

import numpy as np
import torch

from verl_like.batch import columns
from verl_like.batch.columns import Array
from verl_like.batch.memory import copy_column
from verl_like.batch.ragged import ColumnValues, RaggedTensor, to_padded
from verl_like.batch.tensordict_import import TensorDict
from verl_like.errors import BatchError

Keys = str | Iterable[str] | None
Names = str | list[str] | tuple[str, ...]
T = TypeVar("T")
_Slice = slice  # the class below has a method of this name


@dataclass(frozen=True)
class Shard:
    """The rows of a split batch that one chunk holds."""

    index: int
    """Index of this chunk, 0..count-1."""
    count: int
    """Number of chunks that the batch was split into."""
    start: int
    """Global row number of this chunk's row 0."""
    rows: int
    """Real rows of this chunk; the rows after them are padding."""
    total: int
    """Real rows of the whole batch."""


@dataclass
class DataProtoItem:
    """One row of a batch, as `data[3]` returns it."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class DataProto:
    """A batch: tensor columns and object columns, aligned by rows, and `meta_info`.

    Example:

        data = DataProto.from_dict({"input_ids": ids}, {"uid": uids}, {"temperature": 1.0})
        lengths = data.padded("input_ids").ne(0).sum(dim=-1)
        first, second = data.chunk(2)

    Args:
        batch: the dense tensor columns.
        non_tensor_batch: columns of Python objects, as arrays or lists.
        meta_info: information about all rows, such as the temperature.
        ragged: tensor columns whose rows have different lengths.
        shard: position of this chunk in the batch that it was split from.

    Raises:
        BatchError: the columns have different numbers of rows, or one is no tensor or array.
    """

    def __init__(
        self,
        batch: TensorDict | None = None,
        non_tensor_batch: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        *,
        ragged: Mapping[str, RaggedTensor] | None = None,
        shard: Shard | None = None,
    ) -> None:
        """Take these columns, which stay shared, and check that they have equally many rows."""
        self._dense = batch
        self._ragged = dict(ragged or {})
        self.non_tensor_batch = {
            name: columns.as_array(name, column)
            for name, column in (non_tensor_batch or {}).items()
        }
        """Numpy arrays, mostly 1-D and of objects; dim 0 counts rows."""
        self.meta_info = dict(meta_info or {})
        """Information about all rows."""
        self.shard = shard
        """The chunk's position in the batch from which a group split it; None for other batches.

        Batches derived from a chunk have no `shard`.
        """
        self.check_consistency()

    @property
    def batch(self) -> TensorDict:
        """The tensor columns in verl's layout: all are dense, and ragged ones are padded.

        The first access pads the ragged columns permanently, so a write into this TensorDict is a
        write into the batch. A batch without tensor columns returns None, which its type leaves out
        as verl's does, so that an editor accepts `data.batch["x"]`.
        """
        if self._ragged:
            rectangles = {name: to_padded(column) for name, column in self.columns.items()}
            self._dense, self._ragged = self._parts(rectangles, len(self))
        return cast(TensorDict, self._dense)

    @batch.setter
    def batch(self, batch: TensorDict | None) -> None:
        self._dense, self._ragged = batch, {}

    @property
    def columns(self) -> dict[str, ColumnValues]:
        """The tensor columns as stored, by name, in a new dict."""
        return {**columns.tensor_columns(self._dense), **self._ragged}

    def column(self, name: str) -> ColumnValues:
        """Return a tensor column as stored."""
        columns.known_keys(name, self.columns, "tensor column")
        return self.columns[name]

    def padded(self, name: str) -> torch.Tensor:
        """Return a tensor column as a rectangle; for a ragged one, a copy that the batch does not
        store.
        """
        return to_padded(self.column(name))

    def set_columns(self, new_columns: Mapping[str, ColumnValues]) -> Self:
        """Add or replace tensor columns, in place."""
        columns.check_lengths(
            ({"the batch": len(self)} if self._has_rows() else {})
            | {name: len(column) for name, column in new_columns.items()}
        )
        rows = len(self) if self._has_rows() else len(next(iter(new_columns.values()), ()))
        self._dense, self._ragged = self._parts({**self.columns, **new_columns}, rows)
        return self

    def _derived(
        self,
        tensors: Mapping[str, ColumnValues],
        rows: int,
        arrays: dict[str, Array],
        meta: dict[str, Any],
    ) -> Self:
        """Return a batch of this batch's class and device."""
        dense, ragged = self._parts(tensors, rows)
        return type(self)(dense, arrays, meta, ragged=ragged)

    def _parts(
        self, tensors: Mapping[str, ColumnValues], rows: int
    ) -> tuple[TensorDict | None, dict[str, RaggedTensor]]:
        """Return the dense columns as a TensorDict, which knows the rows, and the ragged ones."""
        ragged = {name: c for name, c in tensors.items() if isinstance(c, RaggedTensor)}
        dense = _without(tensors, ragged)
        had_no_tensors = self._dense is None and not self._ragged
        if not dense and self._dense is None and (ragged or had_no_tensors):
            return None, ragged
        device = None if self._dense is None else self._dense.device
        return TensorDict(dense, batch_size=[rows], device=device), ragged

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, ColumnValues] | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """Return a batch of these columns; a list among the non-tensors becomes one object per row.

        `auto_padding` has no effect: dispatch always pads a batch that does not divide.

        Args:
            tensors: name -> tensor [rows, ...], or `RaggedTensor`.
            non_tensors: name -> array or list with one element per row.
            meta_info: information about all rows.
            num_batch_dims: must be 1.
            auto_padding: for verl's code.

        Raises:
            BatchError: the columns have different numbers of rows, or `num_batch_dims` is not 1.
        """
        if num_batch_dims != 1:
            raise BatchError(
                f"a batch has one batch dim, not {num_batch_dims}. Leave out num_batch_dims, and "
                "flatten the dims with unfold_batch_dim(data, batch_dims)."
            )
        arrays = {
            name: columns.as_array(name, column) for name, column in (non_tensors or {}).items()
        }
        tensors = dict(tensors or {})
        rows = None
        for name, column in tensors.items():
            if not isinstance(column, RaggedTensor):
                columns.check_tensor(name, column)
                rows = len(column)
        everything: dict[str, Any] = {**tensors, **arrays}
        columns.check_lengths({name: len(column) for name, column in everything.items()})
        return cls._from_parts(rows, tensors, arrays, meta_info)

    @classmethod
    def from_single_dict(
        cls,
        data: dict[str, Any],
        meta_info: dict[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """Return a batch of the tensors and numpy arrays in one dict."""
        tensors: dict[str, ColumnValues] = {}
        arrays: dict[str, Array] = {}
        for name, column in data.items():
            if isinstance(column, (torch.Tensor, RaggedTensor)):
                tensors[name] = column
            elif isinstance(column, np.ndarray):
                arrays[name] = column
            else:
                raise BatchError(
                    f"column {name!r} has the type {type(column).__name__}. Use a "
                    "torch.Tensor or a numpy array."
                )
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls,
        tensor_dict: TensorDict,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> Self:
        """Return a batch of the entries of a TensorDict; the inverse of `to_tensordict`."""
        if num_batch_dims != 1:
            raise BatchError(f"a batch has one batch dim, not {num_batch_dims}.")
        from verl_like.batch import tensordicts

        batch, arrays, meta = tensordicts.split_parts(tensor_dict)
        return cls(batch, arrays, columns.union_meta(meta, meta_info or {}, "from_tensordict"))

    def to_tensordict(self) -> TensorDict:
        """Return one TensorDict of all three parts, with padding; rows of numpy columns become
        objects.

        Names must not clash.
        """
        from verl_like.batch import tensordicts

        tensors = {name: to_padded(column) for name, column in self.columns.items()}
        return tensordicts.merge_parts(len(self), tensors, self.non_tensor_batch, self.meta_info)

    def check_consistency(self) -> None:
        """Raise unless all columns have string names and equal lengths, and tensors are dense."""
        lengths = {}
        if self._dense is not None:
            if not isinstance(self._dense, TensorDict):
                kind = type(self._dense).__name__
                raise BatchError(f"batch is not a TensorDict ({kind}). Use from_dict().")
            size = tuple(self._dense.batch_size)
            if len(size) != 1:
                raise BatchError(f"a batch has one batch dim, not batch_size {size}.")
            for name, tensor in columns.tensor_columns(self._dense).items():
                columns.check_tensor(name, tensor)
            lengths["batch (its tensors)"] = size[0]
        for name, column in self._ragged.items():
            lengths[name] = len(column)
        for name, array in self.non_tensor_batch.items():
            if not isinstance(name, str) or not isinstance(array, np.ndarray) or not array.ndim:
                raise BatchError(
                    f"non-tensor column {name!r} is not a numpy array with rows, or its name is "
                    "not a string."
                )
            lengths[name] = len(array)
        columns.check_lengths(lengths)

    def __len__(self) -> int:
        """Number of rows, padding included."""
        if self._dense is not None:
            return int(self._dense.batch_size[0])
        columns: list[Any] = [*self._ragged.values(), *self.non_tensor_batch.values()]
        return len(columns[0]) if columns else 0

    def _has_rows(self) -> bool:
        """Return whether any part fixes a number of rows, zero included."""
        return self._dense is not None or bool(self._ragged or self.non_tensor_batch)

    def __repr__(self) -> str:
        """Rows, columns and meta keys on one line."""
        names = ", ".join([*self.columns, *self.non_tensor_batch])
        meta = ", ".join(map(str, self.meta_info))
        return (
            f"{type(self).__name__}({len(self)} rows; columns: {names or 'none'}; meta: "
            f"{meta or 'none'})"
        )

    @property
    def num_real_rows(self) -> int:
        """Return the number of rows that are not padding from dispatch."""
        return len(self) if self.shard is None else self.shard.rows

    @property
    def pad_mask(self) -> torch.Tensor:
        """Return a mask [rows] bool, True for rows that dispatch added as padding."""
        return torch.arange(len(self)) >= self.num_real_rows

    def num_bytes(self) -> tuple[int, int]:
        """Return the bytes of the tensor columns and of the arrays (for objects, only the
        references).
        """
        tensors = sum(column.nbytes for column in self.columns.values())
        return tensors, sum(array.nbytes for array in self.non_tensor_batch.values())

    def map_columns(
        self,
        rows: int,
        on_tensor: Callable[[Any], Any],
        on_array: Callable[[Array], Array],
    ) -> Self:
        """Return a new batch of this many rows, with one function applied per kind of column.

        `on_tensor` takes tensor columns, dense or ragged; `on_array` takes arrays.
        """
        tensors = {name: on_tensor(column) for name, column in self.columns.items()}
        arrays = {name: on_array(array) for name, array in self.non_tensor_batch.items()}
        return self._derived(tensors, rows, arrays, self.meta_info)

    def views(self, size: int) -> list[Self]:
        """Return parts of `size` rows that share the batch's storage; the last may be shorter."""
        tensors = {name: column.split(size) for name, column in self.columns.items()}
        parts = []
        for number, start in enumerate(range(0, len(self), size)):
            rows = slice(start, min(start + size, len(self)))
            of_part = {name: columns[number] for name, columns in tensors.items()}
            arrays = {name: array[rows] for name, array in self.non_tensor_batch.items()}
            parts.append(self._derived(of_part, rows.stop - start, arrays, self.meta_info))
        return parts

    def to(self, device: torch.device | str) -> Self:
        """Move the tensors, in place."""
        if self._dense is not None:
            self._dense = self._dense.to(device)
        self._ragged = {name: column.to(device) for name, column in self._ragged.items()}
        return self

    # columns

    def select(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
        deepcopy: bool = False,
    ) -> Self:
        """Return a batch with the columns and meta entries of these names; None selects all.

        Args:
            batch_keys: names of tensor columns.
            non_tensor_batch_keys: names of object columns.
            meta_info_keys: names of meta entries.
            deepcopy: copy the values; otherwise both batches share them.
        """
        picked = self._derived(
            _picked(self.columns, batch_keys, "tensor column"),
            len(self),
            _picked(self.non_tensor_batch, non_tensor_batch_keys, "non-tensor column"),
            _picked(self.meta_info, meta_info_keys, "key of meta_info"),
        )
        return copy.deepcopy(picked) if deepcopy else picked

    def pop(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
    ) -> Self:
        """Move these columns and meta entries out of this batch, into the batch that is returned.

        The parameters are as in `select`, but None moves none of a kind.
        """
        taken = self.select(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        if taken._dense is not None and not taken._dense.keys():
            taken._dense = None
        if taken.columns:
            rest = _without(self.columns, taken.columns)
            self._dense, self._ragged = self._parts(rest, len(self))
        self.non_tensor_batch = _without(self.non_tensor_batch, taken.non_tensor_batch)
        self.meta_info = _without(self.meta_info, taken.meta_info)
        return taken

    def rename(self, old_keys: Names, new_keys: Names) -> Self:
        """Rename tensor columns `old_keys` to `new_keys`, in place; each is a name or a list."""
        for keys in (old_keys, new_keys):
            if not isinstance(keys, (str, list, tuple)):
                raise BatchError(
                    f"rename needs a name or a list of names on both sides, not {old_keys!r} and "
                    f"{new_keys!r}."
                )
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new) or len(set(old)) != len(old):
            raise BatchError(
                f"rename needs distinct old names and equally many new ones: {old} to {new}."
            )

        tensors = self.columns
        columns.known_keys(old, tensors, "tensor column")
        renamed_to = dict(zip(old, new, strict=True))
        renamed = {renamed_to.get(name, name): column for name, column in tensors.items()}
        if len(renamed) != len(tensors):
            raise BatchError(
                f"rename {old} to {new} would give two columns the same name; the batch has "
                f"{list(tensors)}."
            )
        self._dense, self._ragged = self._parts(renamed, len(self))
        return self

    def union(self, other: DataProto) -> Self:
        """Add the other batch's columns and meta entries, in place.

        Entries in both must be equal (NaN equals NaN).
        """
        both_have_rows = self._has_rows() and other._has_rows()
        if both_have_rows and len(self) != len(other):
            raise BatchError(
                f"union: the batches have {len(self)} and {len(other)} rows, but must have "
                "equally many."
            )
        tensors = columns.union_columns(self.columns, other.columns)
        arrays = columns.union_columns(self.non_tensor_batch, other.non_tensor_batch)
        meta = columns.union_meta(self.meta_info, other.meta_info, "union")
        if self._dense is None and other._dense is not None:
            self._dense = other._dense.copy()
        self._dense, self._ragged = self._parts(tensors, len(self))
        self.non_tensor_batch, self.meta_info = arrays, meta
        return self

    @staticmethod
    def concat(data: Iterable[DataProto]) -> DataProto:
        """Return the rows of all parts in order.

        Columns and meta entries must agree; `metrics` become a dict of lists.
        """
        parts = list(data)
        if not parts:
            raise BatchError("concat needs at least one batch, but the list of batches is empty.")
        for place, part in enumerate(parts):
            if not isinstance(part, DataProto):
                raise BatchError(
                    f"concat: part {place} must be a DataProto, not {type(part).__name__}."
                )
        all_tensors = [part.columns for part in parts]
        all_arrays = [part.non_tensor_batch for part in parts]
        columns.check_same_keys([list(tensors) for tensors in all_tensors], "tensor column")
        columns.check_same_keys([list(arrays) for arrays in all_arrays], "non-tensor column")
        meta = columns.concat_meta([part.meta_info for part in parts])

        joined = columns.concat_columns(all_tensors)
        arrays = columns.concat_columns(all_arrays)
        model = next((part for part in parts if part._dense is not None), parts[0])
        return model._derived(joined, sum(map(len, parts)), arrays, meta)

    # rows

    @overload
    def __getitem__(self, item: int) -> DataProtoItem: ...
    @overload
    def __getitem__(self, item: _Slice | list[Any] | Array | torch.Tensor) -> Self: ...
    def __getitem__(self, item: Any) -> Any:
        """Return a row by number, or rows by slice, list, array or tensor of numbers, or mask."""
        if isinstance(item, _Slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, (list, np.ndarray, torch.Tensor)):
            return self.select_idxs(item)
        if isinstance(item, bool) or not isinstance(item, (int, np.integer)):
            raise TypeError(
                "a batch is indexed by int, slice, list, array or tensor, not by "
                f"{type(item).__name__}."
            )
        return self._row(int(item))

    def _row(self, row: int) -> DataProtoItem:
        rows = len(self)
        if not -rows <= row < rows:
            raise IndexError(f"row {row} does not exist: the batch has {rows} rows.")

        row %= rows
        tensors = {}
        for name, column in self.columns.items():
            tensors[name] = to_padded(column[row : row + 1].clone())[0]
        batch = TensorDict(tensors, batch_size=[]) if tensors or self._dense is not None else None
        arrays = {
            name: copy.copy(a[row]) if a.ndim > 1 else a[row]
            for name, a in self.non_tensor_batch.items()
        }
        return DataProtoItem(batch, arrays, dict(self.meta_info))

    def slice(
        self, start: int | None = None, end: int | None = None, step: int | None = None
    ) -> Self:
        """Return the rows of `data[start:end:step]`."""
        picked = range(*_Slice(start, end, step).indices(len(self)))
        if picked.step != 1:
            return self.select_idxs(list(picked))
        rows = _Slice(picked.start, picked.stop)
        return self.map_columns(
            len(picked), lambda column: column[rows].clone(), lambda array: array[rows].copy()
        )

    def select_idxs(self, idxs: Sequence[Any] | Array | torch.Tensor) -> Self:
        """Return rows by numbers (repeats allowed, negative ones count back) or by a mask."""
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
                f"reorder needs each of the {len(self)} rows once. Use select_idxs() for other "
                "selections."
            )
        return self._take_columns(self.select_idxs(rows))

    def _take_columns(self, other: DataProto) -> Self:
        """Replace the columns by the other batch's, and drop the shard, which no longer applies."""
        self._dense, self._ragged = other._dense, other._ragged
        self.non_tensor_batch, self.shard = other.non_tensor_batch, None
        return self

    def chunk(self, chunks: int) -> list[Self]:
        """Split the batch into `chunks` parts, longer ones first; sizes differ by one at most.

        The last parts are empty when there are fewer rows than parts.
        """
        if chunks < 1:
            raise BatchError(f"chunk needs at least 1 part, not {chunks}.")
        size, longer = divmod(len(self), chunks)
        bounds = [part * size + min(part, longer) for part in range(chunks + 1)]
        return [self.slice(start, end) for start, end in zip(bounds[:-1], bounds[1:], strict=True)]

    def split(self, split_size: int) -> list[Self]:
        """Return parts of `split_size` rows; the last may be shorter, and no part is empty."""
        if split_size < 1:
            raise BatchError(f"split needs parts of at least 1 row, not {split_size}.")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Return each row `repeat_times` times: aabb, or abab with `interleave=False`.

        The copies of a row share its objects.
        """
        if repeat_times < 0:
            raise BatchError(f"repeat needs a count of at least 0, not {repeat_times}.")
        if not interleave:
            return self.select_idxs(np.tile(np.arange(len(self)), repeat_times))
        return self.map_columns(
            len(self) * repeat_times,
            lambda column: column.repeat_interleave(repeat_times, 0),
            lambda array: array.repeat(repeat_times, 0),
        )

    # copies, pickles and files

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle tensors and numeric arrays as out-of-band buffers; they arrive on the CPU."""
        from verl_like.batch import formats

        arrays = {}
        for name, array in self.non_tensor_batch.items():  # numpy sends contiguous ones out of band
            arrays[name] = array if array.dtype.hasobject else np.ascontiguousarray(array)
        rows = None if self._dense is None else len(self)
        tensors = formats.pack_columns(self.columns, int(protocol))
        return _unpickled, (type(self), rows, tensors, arrays, self.meta_info, self.shard)

    def __copy__(self) -> Self:
        """Return a batch that shares every column."""
        copied = self.select()
        copied.shard = self.shard
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a copy, objects included; tensors stay on their device."""
        copied = self.writable_copy()
        copied.non_tensor_batch = copy.deepcopy(self.non_tensor_batch, memo)
        copied.meta_info = copy.deepcopy(self.meta_info, memo)
        return copied

    def writable_copy(self) -> Self:
        """Return a copy of the batch with private memory under every column, and with its shard.

        Objects, and the lengths and starts of ragged columns, stay shared.
        """
        copied = self.map_columns(
            len(self),
            lambda column: (
                column.clone() if isinstance(column, RaggedTensor) else copy_column(column)
            ),
            np.ndarray.copy,
        )
        copied.shard = self.shard
        return copied

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Write one safetensors file, atomically.

        An object that JSON cannot represent is rejected, with its column and row.
        """
        from verl_like.batch import formats

        self.check_consistency()
        rows = None if self._dense is None else len(self)
        formats.save(filepath, rows, self.columns, self.non_tensor_batch, self.meta_info)

    @classmethod
    def load_from_disk(cls, filepath: str | os.PathLike[str]) -> Self:
        """Read a file of `save_to_disk`, even of a stranger, because reading runs no code."""
        from verl_like.batch import formats

        return formats.load(filepath, cls._from_parts)

    @classmethod
    def _from_parts(
        cls,
        rows: int | None,
        tensors: dict[str, ColumnValues],
        arrays: dict[str, Array],
        meta: dict[str, Any] | None,
        shard: Shard | None = None,
    ) -> Self:
        """Return a batch of these columns; `rows` is None for a batch without a TensorDict."""
        ragged = {
            name: column for name, column in tensors.items() if isinstance(column, RaggedTensor)
        }
        batch = None
        if rows is not None:
            batch = TensorDict(_without(tensors, ragged), batch_size=[rows])
        return cls(batch, arrays, meta, ragged=ragged, shard=shard)


def _unpickled(
    cls: type[DataProto], rows: int | None, tensors: dict[str, Any], *others: Any
) -> DataProto:
    """Rebuild a pickled batch."""
    from verl_like.batch import formats

    return cls._from_parts(rows, formats.unpack_columns(tensors), *others)


def _picked(entries: Mapping[str, T], keys: Keys, kind: str) -> dict[str, T]:
    """Return the entries of these keys; all of them if `keys` is None."""
    if keys is None:
        return dict(entries)
    return {key: entries[key] for key in columns.known_keys(keys, entries, kind)}


def _without(entries: Mapping[str, Any], taken: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in entries.items() if name not in taken}
