"""`DataProto`, the batch that every role method takes and returns, and the functions on batches
(verl's names).

Three parts aligned on rows: `batch` (a TensorDict of dense tensors), `non_tensor_batch` (numpy
arrays, mostly of objects) and `meta_info` (a dict about all rows):

    data = DataProto.from_dict({"input_ids": ids}, {"uid": ["0-0", "1-0"]}, {"temperature": 1.0})
    data.union(rollout.generate_sequences(data.select(["input_ids"])))
    for mini_batch in data.split(64): ...

Methods leave the batch and the caller's containers alone, except `union`, `rename`, `reorder`,
`padding` and `to`, which change the batch and return it, and `pop`. Picking rows copies them;
picking columns shares them.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import torch

from verl_like.batch import columns
from verl_like.batch import disk as batch_disk
from verl_like.batch import wire as batch_wire
from verl_like.batch.columns import Array, union_numpy_dict, union_tensor_dict
from verl_like.batch.memory import copy_of
from verl_like.batch.parts import DataProtoItem, Shard
from verl_like.batch.rows import BatchRows
from verl_like.batch.tensordicts import NonTensorData, NonTensorStack, TensorDict
from verl_like.errors import BatchError

__all__ = [
    "DataProto",
    "DataProtoItem",
    "Shard",
    "collate_fn",
    "fold_batch_dim",
    "pad_dataproto_to_divisor",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]

Keys = str | Iterable[str] | None
Names = str | list[str] | tuple[str, ...]


class DataProto(BatchRows):
    """A batch of rows; see the module's docstring."""

    @classmethod
    def from_dict(
        cls,
        tensors: dict[str, torch.Tensor] | None = None,
        non_tensors: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
        auto_padding: bool = False,
    ) -> Self:
        """A batch of these columns; a list among the non-tensors becomes one object per row.

        `auto_padding` is verl's: here dispatch pads any batch that does not divide, with or without
        it.
        """
        if num_batch_dims != 1:
            raise BatchError(
                f"A batch has one batch dim, not {num_batch_dims}: flatten with unfold_batch_dim()."
            )
        tensors = tensors or {}
        for name, column in tensors.items():
            columns.check_tensor(name, column)
        arrays = {
            name: columns.as_array(name, column) for name, column in (non_tensors or {}).items()
        }
        lengths = {name: len(column) for name, column in tensors.items()}
        columns.check_lengths(lengths | {name: len(array) for name, array in arrays.items()})
        batch = TensorDict(tensors, batch_size=[next(iter(lengths.values()))]) if tensors else None
        return cls(batch, arrays, meta_info or {})

    @classmethod
    def from_single_dict(
        cls,
        data: dict[str, Any],
        meta_info: dict[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """A batch of one dict's tensors and numpy arrays, sorted by type."""
        for name, column in data.items():
            if not isinstance(column, (torch.Tensor, np.ndarray)):
                raise BatchError(
                    f"Column {name!r} is a {type(column).__name__}: give a torch.Tensor or numpy "
                    "array."
                )
        tensors = {
            name: column for name, column in data.items() if isinstance(column, torch.Tensor)
        }
        arrays = {name: column for name, column in data.items() if isinstance(column, np.ndarray)}
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls,
        tensor_dict: TensorDict,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> Self:
        """The inverse of `to_tensordict`:

        NonTensorStack becomes an object column, NonTensorData an entry of meta.
        """
        if tensor_dict.batch_dims != 1 or num_batch_dims != 1:
            raise BatchError(
                f"A batch has one batch dim; this TensorDict has {tuple(tensor_dict.batch_size)}."
            )
        tensors: dict[str, Any] = {}
        arrays: dict[str, Array] = {}
        meta: dict[str, Any] = {}
        for name in map(str, tensor_dict.keys()):
            column = tensor_dict.get(name)
            if isinstance(column, NonTensorStack):
                arrays[name] = columns.object_rows(row.data for row in column.unbind(0))
            elif isinstance(column, NonTensorData):
                meta[name] = column.data
            else:
                tensors[name] = column
        batch = None
        if tensors or not arrays:
            batch = TensorDict(
                tensors, batch_size=tensor_dict.batch_size, device=tensor_dict.device
            )
        return cls(batch, arrays, columns.union_meta(meta, meta_info or {}, "from_tensordict"))

    def to_tensordict(self) -> TensorDict:
        """One TensorDict of all three parts; rows of numpy columns become objects, names must not
        clash.
        """
        merged: dict[str, Any] = {**columns.tensors_of(self.batch)}
        rows = len(self)
        for name, array in self.non_tensor_batch.items():
            if name in merged:
                raise BatchError(
                    f"to_tensordict: {name!r} is a tensor and a non-tensor column; rename() one."
                )
            # tensordict has no stack of no rows, so one is put in and cut off again
            merged[name] = NonTensorStack(*map(NonTensorData, array), NonTensorData(None))[:rows]
        for key, value in self.meta_info.items():
            if key in merged:
                raise BatchError(
                    f"to_tensordict: {key!r} is a column and a key of meta_info; rename() the "
                    "column."
                )
            merged[key] = NonTensorData(value, batch_size=[rows])
        return TensorDict(merged, batch_size=[rows])

    def to(self, device: torch.device | str) -> Self:
        """Move the tensors, in place."""
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    def select(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
        deepcopy: bool = False,
    ) -> Self:
        """A batch with these columns and meta entries (None: all of a kind), shared unless
        `deepcopy`.
        """
        picked = self._pick(batch_keys, non_tensor_batch_keys, meta_info_keys)
        return copy.deepcopy(picked) if deepcopy else picked

    def _pick(self, batch_keys: Keys, non_tensor_batch_keys: Keys, meta_info_keys: Keys) -> Self:
        """The columns of `select` and `pop`."""
        batch, arrays, meta = self.batch, self.non_tensor_batch, self.meta_info
        if batch_keys is not None:
            batch_keys = columns.known_keys(batch_keys, columns.tensors_of(batch), "tensor column")
        if non_tensor_batch_keys is not None:
            arrays = {
                key: arrays[key]
                for key in columns.known_keys(non_tensor_batch_keys, arrays, "non-tensor column")
            }
        if meta_info_keys is not None:
            meta = {
                key: meta[key]
                for key in columns.known_keys(meta_info_keys, meta, "key of meta_info")
            }
        if batch is not None:
            batch = batch.copy() if batch_keys is None else batch.select(*batch_keys)
        return type(self)(batch, arrays, meta)

    def pop(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
    ) -> Self:
        """Take these columns and meta entries (None: none of a kind) out of this batch, into the
        one returned.
        """
        taken = self._pick(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        if self.batch is not None and taken.batch is not None:
            self.batch = self.batch.exclude(*taken.batch.keys())
            if not taken.batch.keys():
                taken.batch = None
        self.non_tensor_batch = {
            k: v for k, v in self.non_tensor_batch.items() if k not in taken.non_tensor_batch
        }
        self.meta_info = {k: v for k, v in self.meta_info.items() if k not in taken.meta_info}
        return taken

    def rename(self, old_keys: Names, new_keys: Names) -> Self:
        """Rename tensor columns, in place; one name each, or two lists."""
        if not isinstance(old_keys, (str, list, tuple)) or not isinstance(
            new_keys, (str, list, tuple)
        ):
            raise BatchError(
                f"rename takes a name or a list of names on both sides, not {old_keys!r} and "
                f"{new_keys!r}."
            )
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys)
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys)
        if len(old) != len(new) or len(set(old)) != len(old):
            raise BatchError(
                f"rename needs as many new names as (different) old ones: {old} to {new}."
            )
        have = list(columns.tensors_of(self.batch))
        columns.known_keys(old, have, "tensor column")
        names = dict(zip(have, have, strict=True)) | dict(zip(old, new, strict=True))
        if len(set(names.values())) != len(names):
            raise BatchError(
                f"rename {old} to {new} would give two columns one name; the batch has {have}."
            )
        if self.batch is not None:
            renamed = {
                names[name]: column for name, column in columns.tensors_of(self.batch).items()
            }
            self.batch = TensorDict(
                renamed, batch_size=self.batch.batch_size, device=self.batch.device
            )
        return self

    def union(self, other: DataProto) -> Self:
        """Add the other's columns and meta entries, in place.

        What both have must be equal (NaN equals NaN).
        """
        ours, theirs = self._has_rows(), other._has_rows()
        if ours and theirs and len(self) != len(other):
            raise BatchError(
                f"Union of batches of {len(self)} and {len(other)} rows: they need the same rows."
            )
        batch = self.batch if other.batch is None else other.batch.copy()
        if self.batch is not None and other.batch is not None:
            batch = union_tensor_dict(self.batch, other.batch)
        arrays = union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch)
        meta = columns.union_meta(self.meta_info, other.meta_info, "Union")
        self.batch, self.non_tensor_batch, self.meta_info = batch, arrays, meta
        return self

    def _has_rows(self) -> bool:
        """Whether anything here fixes a number of rows, zero included."""
        return self.batch is not None or bool(self.non_tensor_batch)

    @staticmethod
    def concat(data: Iterable[DataProto]) -> DataProto:
        """The rows of all parts in order.

        Columns and meta entries must agree; `metrics` become a dict of lists.
        """
        parts = list(data)
        if not parts:
            raise BatchError("concat of no batches: there is nothing to take the columns from.")
        for place, part in enumerate(parts):
            if not isinstance(part, DataProto):
                raise BatchError(
                    f"Concat: part {place} is a {type(part).__name__}, not a DataProto."
                )
        tensors = [columns.tensors_of(part.batch) for part in parts]
        columns.check_same_keys([list(part) for part in tensors], "tensor column")
        columns.check_same_keys(
            [list(part.non_tensor_batch) for part in parts], "non-tensor column"
        )
        meta = columns.concat_meta([part.meta_info for part in parts])
        arrays = {
            name: columns.concat_column(name, [part.non_tensor_batch[name] for part in parts])
            for name in parts[0].non_tensor_batch
        }
        batch = None
        given = next((part.batch for part in parts if part.batch is not None), None)
        if given is not None:
            joined = {
                name: columns.concat_column(name, [part[name] for part in tensors])
                for name in tensors[0]
            }
            batch = TensorDict(joined, batch_size=[sum(map(len, parts))], device=given.device)
        return type(parts[0])(batch, arrays, meta)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Tensors and numeric arrays go as out-of-band buffers (see `batch_wire`); they arrive on
        the CPU.
        """
        arrays = {
            name: batch_wire.pack_array(array) for name, array in self.non_tensor_batch.items()
        }
        wire = batch_wire.pack_tensors(self.batch, int(protocol))
        return _from_wire, (type(self), wire, arrays, self.meta_info, self.shard)

    def __copy__(self) -> Self:
        """Another batch that shares every column."""
        copied = self._pick(None, None, None)
        copied.shard = self.shard
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Another batch that shares nothing; tensors stay on their device."""
        copied = self.writable_copy()
        copied.non_tensor_batch = copy.deepcopy(self.non_tensor_batch, memo)
        copied.meta_info = copy.deepcopy(self.meta_info, memo)
        return copied

    def writable_copy(self) -> Self:
        """The same batch, shard facts included, with private memory under every column (objects
        stay shared).
        """
        copied = self.map_columns(len(self), copy_of, np.ndarray.copy)
        copied.shard = self.shard
        return copied

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Write one safetensors file, all or nothing; objects that JSON cannot hold are refused by
        column and row.
        """
        self.check_consistency()
        batch_disk.save(filepath, self.batch, self.non_tensor_batch, self.meta_info)

    @classmethod
    def load_from_disk(cls, filepath: str | os.PathLike[str]) -> Self:
        """Read a file of `save_to_disk`; nothing in it is run, whoever wrote it."""
        return batch_disk.load(filepath, cls)


def _from_wire(
    cls: type[DataProto],
    wire: batch_wire.Wire | None,
    arrays: dict[str, Array],
    meta: dict[str, Any],
    shard: Shard | None,
) -> DataProto:
    """What a pickled batch calls to be one again."""
    return cls(batch_wire.unpack_tensors(wire), arrays, meta, shard=shard)


def collate_fn(x: Sequence[DataProtoItem]) -> DataProto:
    """A batch of single rows; what is not a tensor becomes an object column, meta entries must
    agree.
    """
    if not x:
        raise BatchError("collate_fn got no rows.")
    meta: dict[str, Any] = {}
    for place, item in enumerate(x):
        meta = columns.union_meta(
            meta, item.meta_info, f"collate_fn, row {place} and those before it"
        )
    tensors = [columns.tensors_of(item.batch) for item in x]
    columns.check_same_keys([list(row) for row in tensors], "tensor column")
    columns.check_same_keys([list(item.non_tensor_batch) for item in x], "non-tensor column")
    batch = None
    if x[0].batch is not None:
        stacked = {name: torch.stack([row[name] for row in tensors]) for name in tensors[0]}
        batch = TensorDict(stacked, batch_size=[len(x)])
    arrays = {
        name: columns.object_rows(item.non_tensor_batch[name] for item in x)
        for name in x[0].non_tensor_batch
    }
    return DataProto(batch, arrays, meta)


def pad_dataproto_to_divisor(data: DataProto, size_divisor: int) -> tuple[DataProto, int]:
    """The batch filled up to a multiple of `size_divisor` with its own rows from the front, and how
    many were added.
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
        lambda column: column.clone().reshape(*dims, *column.shape[1:]),
        lambda array: array.copy().reshape(*dims, *array.shape[1:]),
    )


def unfold_batch_dim(data: DataProto, batch_dims: int = 2) -> DataProto:
    """The first `batch_dims` dims of every column become one, rows, copied."""
    leading = {
        name: tuple(column.shape[:batch_dims]) for name, column in data.non_tensor_batch.items()
    }
    leading |= {
        name: tuple(column.shape[:batch_dims])
        for name, column in columns.tensors_of(data.batch).items()
    }
    if (
        batch_dims < 1
        or len(set(leading.values())) > 1
        or any(len(dims) < batch_dims for dims in leading.values())
    ):
        raise BatchError(
            f"unfold_batch_dim needs columns that agree in their first {batch_dims} dims, not "
            f"{leading}."
        )
    rows = math.prod(next(iter(leading.values()), (0,)))
    return data.map_columns(
        rows,
        lambda column: column.clone().reshape(rows, *column.shape[batch_dims:]),
        lambda array: array.copy().reshape(rows, *array.shape[batch_dims:]),
    )
