"""A TensorDict that a group splits, pads, sends and collects like a `DataProto`.

Methods take and return TensorDicts if the driver passes them. In transit a TensorDict is a
`TensorDictRows`, a batch that can be turned back; no method of a worker ever sees it. Its nested
tensors are ragged columns in transit.
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
    """A TensorDict in transit."""

    @classmethod
    def of(cls, whole: TensorDict) -> Self:
        """Return rows for a TensorDict with one batch dim, or without any if it has only
        `NonTensorData`.
        """
        if not whole.batch_dims:
            return cls(None, {}, _entries(whole))
        nested = {n: c for n, c in tensors_of(whole).items() if tensordicts.is_nested(c)}
        rest = whole.exclude(*nested) if nested else whole
        batch, arrays, meta = tensordicts.split_parts(rest)
        if batch is None:  # the number of rows is known anyway
            batch = TensorDict({}, batch_size=whole.batch_size)
        ragged = {n: tensordicts.ragged_of_nested(n, column) for n, column in nested.items()}
        return cls(batch, arrays, meta, ragged=ragged)

    def whole(self) -> TensorDict:
        """Return the TensorDict again; the TensorDict of a chunk has its `shard`."""
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
    """Prepare the chunks of one TensorDict for concatenation.

    Nested columns get one width, the longest row's. The first chunk's `NonTensorData` are used, as
    in `torch.cat`.
    """
    widths: dict[str, int] = {}
    for chunk in chunks:
        for name, column in chunk.columns.items():
            if isinstance(column, Ragged):
                widths[name] = max(widths.get(name, 0), column.width)

    parts = []
    for chunk in chunks:
        selected = chunk.select(meta_info_keys=None if chunk is chunks[0] else ())
        wide = {}
        for name, column in selected.columns.items():
            if isinstance(column, Ragged):
                wide[name] = Ragged(column.values, column.lengths, widths[name], column.starts)
        parts.append(selected.set_columns(wide))
    return parts


def rows_of(value: Any) -> Any:
    """Return a TensorDict as rows, and any other value unchanged."""
    return TensorDictRows.of(value) if isinstance(value, TensorDict) else value


def value_of(value: Any) -> Any:
    """Return the TensorDict of rows, for a method or the driver, and any other value unchanged."""
    return value.whole() if isinstance(value, TensorDictRows) else value


def _entries(whole: TensorDict) -> dict[str, Any]:
    """Return the entries of a TensorDict that has no rows."""
    entries = {}
    for name in map(str, whole.keys()):
        column = whole.get(name)
        if not isinstance(column, NonTensorData):
            raise BatchError(
                f"A TensorDict without a batch dim holds only NonTensorData, and {name!r} is a "
                f"{type(column).__name__}: give it batch_size=[rows]."
            )
        entries[name] = column.data
    return entries
