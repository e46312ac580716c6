"""`DataProto`, the batch that every role method takes and returns (verl's names).

Three parts aligned on rows: `batch` (a TensorDict of dense tensors), `non_tensor_batch` (numpy
arrays, mostly of objects) and `meta_info` (a dict about all rows):

    data = DataProto.from_dict({"input_ids": ids}, {"uid": ["0-0", "1-0"]}, {"temperature": 1.0})
    data.union(rollout.generate_sequences(data.select(["input_ids"])))
    for mini_batch in data.split(64): ...

Methods leave the batch and the caller's containers alone, except `union`, `rename`, `reorder`,
`padding` and `to`, which change the batch and return it, and `pop`. Picking rows copies them;
picking columns shares them.

Here are building, columns, union and concat, pickle and disk. What is checked is in
`verl_like.batch.parts`, the methods that pick rows are in `verl_like.batch.rows`, and functions on
whole batches in `verl_like.batch.functions`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable
from typing import Any, Self

import numpy as np
import torch

from verl_like.batch import columns, disk, merge, tensordicts, wire
from verl_like.batch.columns import Array
from verl_like.batch.memory import copy_of
from verl_like.batch.parts import DataProtoItem, Shard
from verl_like.batch.rows import BatchRows
from verl_like.batch.tensordict_import import TensorDict
from verl_like.errors import BatchError

__all__ = ["DataProto", "DataProtoItem", "Shard"]

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

        `auto_padding` changes nothing: dispatch pads any batch that does not divide.
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

        batch = None
        if tensors:
            batch = TensorDict(tensors, batch_size=[next(iter(lengths.values()))])
        return cls(batch, arrays, meta_info or {})

    @classmethod
    def from_single_dict(
        cls,
        data: dict[str, Any],
        meta_info: dict[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> Self:
        """A batch of one dict's tensors and numpy arrays, sorted by type."""
        tensors: dict[str, torch.Tensor] = {}
        arrays: dict[str, Array] = {}
        for name, column in data.items():
            if isinstance(column, torch.Tensor):
                tensors[name] = column
            elif isinstance(column, np.ndarray):
                arrays[name] = column
            else:
                raise BatchError(
                    f"Column {name!r} is a {type(column).__name__}: give a torch.Tensor or numpy "
                    "array."
                )
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    @classmethod
    def from_tensordict(
        cls,
        tensor_dict: TensorDict,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> Self:
        """The inverse of `to_tensordict`."""
        if num_batch_dims != 1:
            raise BatchError(f"A batch has one batch dim, not {num_batch_dims}.")
        batch, arrays, meta = tensordicts.split_parts(tensor_dict)
        return cls(batch, arrays, merge.union_meta(meta, meta_info or {}, "from_tensordict"))

    def to_tensordict(self) -> TensorDict:
        """One TensorDict of all three parts; numpy rows become objects, names must not clash."""
        return tensordicts.merge_parts(len(self), self.batch, self.non_tensor_batch, self.meta_info)

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
        """A batch with these columns and meta entries, shared unless `deepcopy`.

        None takes all of a kind.
        """
        picked = self._pick(batch_keys, non_tensor_batch_keys, meta_info_keys)
        return copy.deepcopy(picked) if deepcopy else picked

    def _pick(self, batch_keys: Keys, non_tensor_batch_keys: Keys, meta_info_keys: Keys) -> Self:
        """The columns of `select` and `pop`."""
        batch = self.batch
        if batch_keys is not None:
            names = columns.known_keys(batch_keys, columns.tensors_of(batch), "tensor column")
            batch = batch if batch is None else batch.select(*names)
        elif batch is not None:
            batch = batch.copy()

        arrays = self.non_tensor_batch
        if non_tensor_batch_keys is not None:
            names = columns.known_keys(non_tensor_batch_keys, arrays, "non-tensor column")
            arrays = {name: arrays[name] for name in names}

        meta = self.meta_info
        if meta_info_keys is not None:
            names = columns.known_keys(meta_info_keys, meta, "key of meta_info")
            meta = {name: meta[name] for name in names}
        return type(self)(batch, arrays, meta)

    def pop(
        self,
        batch_keys: Keys = None,
        non_tensor_batch_keys: Keys = None,
        meta_info_keys: Keys = None,
    ) -> Self:
        """Take these columns and meta entries out of this batch, into the one returned.

        None takes none of a kind.
        """
        taken = self._pick(batch_keys or (), non_tensor_batch_keys or (), meta_info_keys or ())
        if self.batch is not None and taken.batch is not None:
            self.batch = self.batch.exclude(*taken.batch.keys())
            if not taken.batch.keys():
                taken.batch = None
        self.non_tensor_batch = _without(self.non_tensor_batch, taken.non_tensor_batch)
        self.meta_info = _without(self.meta_info, taken.meta_info)
        return taken

    def rename(self, old_keys: Names, new_keys: Names) -> Self:
        """Rename tensor columns, in place; one name each, or two lists."""
        for keys in (old_keys, new_keys):
            if not isinstance(keys, (str, list, tuple)):
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

        tensors = columns.tensors_of(self.batch)
        columns.known_keys(old, tensors, "tensor column")
        renamed_to = dict(zip(old, new, strict=True))
        renamed = {renamed_to.get(name, name): column for name, column in tensors.items()}
        if len(renamed) != len(tensors):
            raise BatchError(
                f"rename {old} to {new} would give two columns one name; the batch has "
                f"{list(tensors)}."
            )
        if self.batch is not None:
            self.batch = TensorDict(
                renamed, batch_size=self.batch.batch_size, device=self.batch.device
            )
        return self

    def union(self, other: DataProto) -> Self:
        """Add the other's columns and meta entries, in place.

        What both have must be equal (NaN equals NaN).
        """
        both_have_rows = self._has_rows() and other._has_rows()
        if both_have_rows and len(self) != len(other):
            raise BatchError(
                f"Union of batches of {len(self)} and {len(other)} rows: they need the same rows."
            )
        batch = self.batch if other.batch is None else other.batch.copy()
        if self.batch is not None and other.batch is not None:
            batch = merge.union_tensor_dict(self.batch, other.batch)
        arrays = merge.union_numpy_dict(self.non_tensor_batch, other.non_tensor_batch)
        meta = merge.union_meta(self.meta_info, other.meta_info, "Union")
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
        all_tensors = [columns.tensors_of(part.batch) for part in parts]
        all_arrays = [part.non_tensor_batch for part in parts]
        merge.check_same_keys([list(tensors) for tensors in all_tensors], "tensor column")
        merge.check_same_keys([list(arrays) for arrays in all_arrays], "non-tensor column")
        meta = merge.concat_meta([part.meta_info for part in parts])

        joined = merge.concat_columns(all_tensors)
        arrays = merge.concat_columns(all_arrays)
        batch = None
        given = next((part.batch for part in parts if part.batch is not None), None)
        if given is not None:
            batch = TensorDict(joined, batch_size=[sum(map(len, parts))], device=given.device)
        return type(parts[0])(batch, arrays, meta)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Tensors and numeric arrays go as out-of-band buffers; they arrive on the CPU."""
        arrays = {name: wire.pack_array(array) for name, array in self.non_tensor_batch.items()}
        tensors = wire.pack_tensors(self.batch, int(protocol))
        return _unpickled, (type(self), tensors, arrays, self.meta_info, self.shard)

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
        """The same batch, shard facts included, with private memory under every column.

        Objects stay shared.
        """
        copied = self.map_columns(len(self), copy_of, np.ndarray.copy)
        copied.shard = self.shard
        return copied

    def save_to_disk(self, filepath: str | os.PathLike[str]) -> None:
        """Write one safetensors file, all or nothing.

        An object that JSON cannot hold is refused by column and row.
        """
        self.check_consistency()
        disk.save(filepath, self.batch, self.non_tensor_batch, self.meta_info)

    @classmethod
    def load_from_disk(cls, filepath: str | os.PathLike[str]) -> Self:
        """Read a file of `save_to_disk`; nothing in it is run, whoever wrote it."""
        return disk.load(filepath, cls)


def _unpickled(
    cls: type[DataProto],
    tensors: wire.Tensors | None,
    arrays: dict[str, Array],
    meta: dict[str, Any],
    shard: Shard | None,
) -> DataProto:
    """What a pickled batch calls to be one again."""
    return cls(wire.unpack_tensors(tensors), arrays, meta, shard=shard)


def _without(entries: dict[str, Any], taken: dict[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in entries.items() if name not in taken}
