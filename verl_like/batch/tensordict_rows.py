"""A TensorDict that a group splits, pads, sends and collects as it does a `DataProto`.

Methods take and return TensorDicts where the driver gives them. On the way a TensorDict is a
`TensorDictRows`, a batch that knows what it was; no method of a worker ever sees it. Nested tensors
are columns of their rows meanwhile.
"""

from __future__ import annotations

from typing import Any, Self

from verl_like.batch import tensordicts, wire
from verl_like.batch.columns import Array, tensors_of
from verl_like.batch.nested_columns import (
    PackedRows,
    is_nested,
    map_rows,
    nested_of_rows,
    pack_rows,
    rows_of_nested,
    unpack_rows,
)
from verl_like.batch.parts import Shard
from verl_like.batch.protocol import DataProto
from verl_like.batch.tensordict_import import NonTensorData, TensorDict
from verl_like.errors import BatchError


class TensorDictRows(DataProto):
    """A TensorDict on its way."""

    @classmethod
    def of(cls, whole: TensorDict) -> Self:
        """A TensorDict with one batch dim, or one of `NonTensorData` alone without any."""
        if not whole.batch_dims:
            return cls(None, {}, _entries(whole))
        names = [name for name, column in tensors_of(whole).items() if _is_nested(column)]
        batch, arrays, meta = tensordicts.split_parts(whole.exclude(*names) if names else whole)
        if batch is None:  # the number of rows is known all the same
            batch = TensorDict({}, batch_size=whole.batch_size)
        nested = {name: rows_of_nested(whole.get(name)) for name in names}
        return cls(batch, arrays | nested, meta)

    def whole(self) -> TensorDict:
        """The TensorDict again; of a piece, with its `shard`."""
        if self.batch is None and not self.non_tensor_batch:
            return TensorDict(
                {key: NonTensorData(value) for key, value in self.meta_info.items()}, batch_size=[]
            )
        nested = [name for name, array in self.non_tensor_batch.items() if is_nested(array)]
        others = {name: a for name, a in self.non_tensor_batch.items() if name not in nested}
        whole = tensordicts.merge_parts(len(self), self.batch, others, self.meta_info)
        for name in nested:
            whole.set(name, nested_of_rows(self.non_tensor_batch[name]))
        if self.shard is not None:
            whole.shard = self.shard
        return whole

    def writable_copy(self) -> Self:
        """The same, with private memory under nested rows, too."""
        copied = super().writable_copy()
        for name, array in copied.non_tensor_batch.items():
            if is_nested(array):
                copied.non_tensor_batch[name] = map_rows(array, lambda row: row.clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """As any batch; nested columns go as one buffer each."""
        arrays = {}
        packed, flat = [], {}
        for name, array in self.non_tensor_batch.items():
            if is_nested(array):
                column, flat[name] = pack_rows(name, array)
                packed.append(column)
            else:
                arrays[name] = wire.pack_array(array)
        tensors = wire.pack_tensors(self.batch, int(protocol))
        buffers = wire.pack_columns(flat, int(protocol))
        return _unpickled, (tensors, arrays, packed, buffers, self.meta_info, self.shard)


def _unpickled(
    tensors: wire.Tensors | None,
    arrays: dict[str, Array],
    packed: list[PackedRows],
    buffers: wire.Columns,
    meta: dict[str, Any],
    shard: Shard | None,
) -> TensorDictRows:
    """What a pickled one calls to be one again."""
    flat = wire.unpack_columns(buffers)
    nested = {column.name: unpack_rows(column, flat[column.name]) for column in packed}
    return TensorDictRows(wire.unpack_tensors(tensors), arrays | nested, meta, shard=shard)


def rows_of(value: Any) -> Any:
    """A TensorDict as rows; any other value as it is."""
    return TensorDictRows.of(value) if isinstance(value, TensorDict) else value


def value_of(value: Any) -> Any:
    """What a method or the driver is given for rows: the TensorDict. Any other value as it is."""
    return value.whole() if isinstance(value, TensorDictRows) else value


def num_nested_bytes(array: Array) -> int:
    """The bytes under a column of nested rows; 0 of another."""
    return sum(row.tensor.nbytes for row in array) if is_nested(array) else 0


def _is_nested(column: Any) -> bool:
    return bool(getattr(column, "is_nested", False))


def _entries(whole: TensorDict) -> dict[str, Any]:
    """The entries of a TensorDict that has no rows."""
    entries = {}
    for name in map(str, whole.keys()):
        column = whole.get(name)
        if not isinstance(column, NonTensorData):
            raise BatchError(
                f"A TensorDict without a batch dim holds NonTensorData alone, and {name!r} is a "
                f"{type(column).__name__}: give it batch_size=[rows]."
            )
        entries[name] = column.data
    return entries
