"""Split the rows of a `DataProto` into one chunk per worker, and join chunks again.

A batch of N rows over n workers becomes n contiguous chunks of ceil(N / n) rows. If n does not
divide N, the last chunks are filled with copies of the batch's first rows. `Shard` marks these
copies, the last rows of a chunk, and the engines give them no weight. The caller's batch is never
changed.

Methods take and return TensorDicts if the driver passes them. In transit a TensorDict is a
`TensorDictRows`, a batch that can be converted back; no method of a worker ever sees it. Its nested
tensors are ragged columns in transit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from verl_like.batch import tensordicts
from verl_like.batch.columns import tensors_of
from verl_like.batch.protocol import DataProto, Shard
from verl_like.batch.ragged import RaggedTensor
from verl_like.batch.tensordict_import import NonTensorData, TensorDict
from verl_like.errors import BatchError, DispatchError


def split_rows(data: DataProto, num_chunks: int) -> list[DataProto]:
    """Return contiguous chunks of equal length, the last ones padded and marked.

    Chunks without pad rows share storage with the batch.
    """
    total = len(data)
    size = -(-total // num_chunks)
    views = [data.select()] if size == total else data.views(size)
    chunks = []
    for index in range(num_chunks):
        start, stop = min(index * size, total), min((index + 1) * size, total)
        if stop - start == size:
            chunk = views[index]
        else:
            padding = [i % total for i in range(size - (stop - start))]
            chunk = data.select_idxs([*range(start, stop), *padding])
        chunk.shard = Shard(
            index=index, count=num_chunks, start=start, rows=stop - start, total=total
        )
        chunks.append(chunk)
    return chunks


def view_rows(data: DataProto, start: int, stop: int) -> DataProto:
    """Return rows [start, stop) that share the batch's storage, only for sending and reading."""
    if start == 0 and stop == len(data):
        return data.select()
    rows = slice(start, stop)
    return data.map_columns(stop - start, lambda column: column[rows], lambda array: array[rows])


def place_chunk(chunk: DataProto, index: int, rows_of_all: Sequence[int]) -> DataProto:
    """Give a chunk that came straight from another group its `Shard`.

    The chunk is padded with copies of its own rows to the length of the longest chunk.
    """
    rows, longest = rows_of_all[index], max(rows_of_all)
    if len(chunk) >= longest:
        placed = view_rows(chunk, 0, longest)
    elif len(chunk) == 0:
        raise BatchError(
            f"chunk {index} of {len(rows_of_all)} has no rows (rows per chunk: "
            f"{list(rows_of_all)}), so it cannot be padded with its own rows. Fetch the batch "
            "with .get() and pass it, or use fewer workers."
        )
    else:
        placed = chunk.select_idxs([i % len(chunk) for i in range(longest)])
    placed.shard = Shard(
        index=index,
        count=len(rows_of_all),
        start=sum(rows_of_all[:index]),
        rows=rows,
        total=sum(rows_of_all),
    )
    return placed


def count_real_rows(result: DataProto, given_rows: int, where: str) -> int:
    """Return the number of rows of a method's result that do not come from pad rows.

    If the method returned k rows per input row, the result is k times the number of real rows. The
    method's chunk had `given_rows` rows, and `result.shard` is the chunk's.
    """
    shard = result.shard
    if shard is None or shard.rows == given_rows or len(result) == 0:
        return len(result)
    if len(result) % given_rows:
        raise DispatchError(
            f"{where} returned {len(result)} rows for {given_rows} ({given_rows - shard.rows} of "
            "them padding): results of padded calls must have the rows of the input or a whole "
            "multiple of them, so that padding can be dropped."
        )
    return shard.rows * (len(result) // given_rows)


def join_chunks(chunks: Sequence[DataProto]) -> DataProto:
    """Return the rows of all chunks in new memory.

    Chunks that have only padding are left out, unless all have.
    """
    with_rows = [chunk for chunk in chunks if chunk.shard is None or chunk.shard.rows > 0]
    joined = with_rows or list(chunks)
    is_tensordict = isinstance(joined[0], TensorDictRows)
    return DataProto.concat(joinable(joined) if is_tensordict else joined)


class TensorDictRows(DataProto):
    """A TensorDict in transit."""

    @classmethod
    def of(cls, tensordict: TensorDict) -> Self:
        """Return rows for a TensorDict with one batch dim, or without any if it has only
        `NonTensorData`.
        """
        if not tensordict.batch_dims:
            return cls(None, {}, _entries(tensordict))
        nested = {n: c for n, c in tensors_of(tensordict).items() if tensordicts.is_nested(c)}
        rest = tensordict.exclude(*nested) if nested else tensordict
        batch, arrays, meta = tensordicts.split_parts(rest)
        if batch is None:  # the number of rows is known anyway
            batch = TensorDict({}, batch_size=tensordict.batch_size)
        ragged = {n: tensordicts.ragged_of_nested(n, column) for n, column in nested.items()}
        return cls(batch, arrays, meta, ragged=ragged)

    def to_tensordict(self) -> TensorDict:
        """Return the TensorDict again; the TensorDict of a chunk has its `shard`."""
        columns = self.columns
        if not self._has_rows():
            return TensorDict(
                {key: NonTensorData(value) for key, value in self.meta_info.items()}, batch_size=[]
            )
        dense = {n: c for n, c in columns.items() if not isinstance(c, RaggedTensor)}
        merged = tensordicts.merge_parts(len(self), dense, self.non_tensor_batch, self.meta_info)
        for name, column in columns.items():
            if isinstance(column, RaggedTensor):
                merged.set(name, tensordicts.nested_of_ragged(column))
        if self.shard is not None:
            merged.shard = self.shard
        return merged


def joinable(chunks: Sequence[DataProto]) -> list[DataProto]:
    """Prepare the chunks of one TensorDict for concatenation.

    Nested columns get one width, the longest row's. The first chunk's `NonTensorData` are used, as
    in `torch.cat`.
    """
    widths: dict[str, int] = {}
    for chunk in chunks:
        for name, column in chunk.columns.items():
            if isinstance(column, RaggedTensor):
                widths[name] = max(widths.get(name, 0), column.width)

    parts = []
    for chunk in chunks:
        selected = chunk.select(meta_info_keys=None if chunk is chunks[0] else ())
        wide = {}
        for name, column in selected.columns.items():
            if isinstance(column, RaggedTensor):
                wide[name] = RaggedTensor(
                    column.values, column.lengths, widths[name], column.starts
                )
        parts.append(selected.set_columns(wide))
    return parts


def rows_of(value: Any) -> Any:
    """Return a TensorDict as rows, and any other value unchanged."""
    return TensorDictRows.of(value) if isinstance(value, TensorDict) else value


def value_of(value: Any) -> Any:
    """Convert `TensorDictRows` back to a TensorDict; return any other value unchanged."""
    return value.to_tensordict() if isinstance(value, TensorDictRows) else value


def _entries(tensordict: TensorDict) -> dict[str, Any]:
    """Return the entries of a TensorDict that has no rows."""
    entries = {}
    for name in map(str, tensordict.keys()):
        column = tensordict.get(name)
        if not isinstance(column, NonTensorData):
            raise BatchError(
                f"a TensorDict without a batch dim holds only NonTensorData, but {name!r} is a "
                f"{type(column).__name__}. Create the TensorDict with batch_size=[rows]."
            )
        entries[name] = column.data
    return entries
