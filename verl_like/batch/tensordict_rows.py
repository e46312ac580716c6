"""A TensorDict that a group splits, pads, sends and collects as it does a `DataProto`.

Methods take and return TensorDicts where the driver gives them. On the way a TensorDict is a
`TensorDictRows`, a batch that knows what it was; no method of a worker ever sees it. Its nested
tensors are ragged columns meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from verl_like.batch import tensordicts
from verl_like.batch.columns import tensors_of
from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import Ragged
from verl_like.batch.tensordict_import import NonTensorData, TensorDict
from verl_like.errors import BatchError


class TensorDictRows(DataProto):
    """A TensorDict on its way."""

    @classmethod
    def of(cls, whole: TensorDict) -> Self:
        """A TensorDict with one batch dim, or one of `NonTensorData` alone without any."""
        if not whole.batch_dims:
            return cls(None, {}, _entries(whole))
        nested = {n: c for n, c in tensors_of(whole).items() if tensordicts.is_nested(c)}
        rest = whole.exclude(*nested) if nested else whole
        batch, arrays, meta = tensordicts.split_parts(rest)
        if batch is None:  # the number of rows is known all the same
            batch = TensorDict({}, batch_size=whole.batch_size)
        ragged = {n: tensordicts.ragged_of_nested(n, column) for n, column in nested.items()}
        return cls(batch, arrays, meta, ragged=ragged)

    def whole(self) -> TensorDict:
        """The TensorDict again; of a chunk, with its `shard`."""
        columns = self.columns
        if not self._has_rows():
            return TensorDict(
                {key: NonTensorData(value) for key, value in self.meta_info.items()}, batch_size=[]
            )
        dense = {n: c for n, c in columns.items() if not isinstance(c, Ragged)}
        whole = tensordicts.merge_parts(len(self), dense, self.non_tensor_batch, self.meta_info)
        for name, column in columns.items():
            if isinstance(column, Ragged):
                whole.set(name, tensordicts.nested_of_ragged(column))
        if self.shard is not None:
            whole.shard = self.shard
        return whole


def joinable(chunks: Sequence[DataProto]) -> list[DataProto]:
    """The chunks of one TensorDict, to be concatenated.

    Nested columns get one width, that of the longest row of all. Of the chunks' `NonTensorData` the
    first one's are kept, as `torch.cat` does.
    """
    widths: dict[str, int] = {}
    for chunk in chunks:
        for name, column in chunk.columns.items():
            if isinstance(column, Ragged):
                widths[name] = max(widths.get(name, 0), column.width)

    made = []
    for chunk in chunks:
        kept = chunk.select(meta_info_keys=None if chunk is chunks[0] else ())
        wide = {}
        for name, column in kept.columns.items():
            if isinstance(column, Ragged):
                wide[name] = Ragged(column.values, column.lengths, widths[name], column.starts)
        made.append(kept.set_columns(wide))
    return made


def rows_of(value: Any) -> Any:
    """A TensorDict as rows; any other value as it is."""
    return TensorDictRows.of(value) if isinstance(value, TensorDict) else value


def value_of(value: Any) -> Any:
    """What a method or the driver is given for rows: the TensorDict. Any other value as it is."""
    return value.whole() if isinstance(value, TensorDictRows) else value


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
