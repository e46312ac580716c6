"""Cutting the rows of a `DataProto` into one chunk per worker, and joining chunks again.

A batch of N rows over n workers becomes n contiguous chunks of ceil(N / n) rows. Where that does
not come out even, the last chunks are filled with copies of the first rows; `Shard` marks them (the
last rows of a chunk) and the engines give them no weight. The caller's batch is never touched.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_like.batch.protocol import DataProto, Shard
from verl_like.batch.tensordict_rows import TensorDictRows, joinable
from verl_like.errors import BatchError, DispatchError


def split_rows(data: DataProto, num_chunks: int) -> list[DataProto]:
    """Contiguous chunks of equal length, the last ones padded and marked.

    Chunks without pad rows share storage.
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
    """Rows [start, stop) that share the batch's storage: for sending and reading only."""
    if start == 0 and stop == len(data):
        return data.select()
    rows = slice(start, stop)
    return data.map_columns(stop - start, lambda column: column[rows], lambda array: array[rows])


def place_chunk(chunk: DataProto, index: int, rows_of_all: Sequence[int]) -> DataProto:
    """Give a chunk that came straight from another group its `Shard`.

    It gets the longest chunk's length too.
    """
    rows, longest = rows_of_all[index], max(rows_of_all)
    if len(chunk) >= longest:
        placed = view_rows(chunk, 0, longest)
    elif len(chunk) == 0:
        raise BatchError(
            f"chunk {index} of {len(rows_of_all)} has no rows (rows per chunk: "
            f"{list(rows_of_all)}), so it cannot be padded with its own rows. Fetch the batch "
            "with .get() and pass it on, or use fewer workers."
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
    """Rows of a method's result that do not come from pad rows.

    Of k rows per row given that is k per real one. `result.shard` is that of the chunk that the
    method got, which had `given_rows` rows.
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
    """The rows of all chunks in memory of their own.

    Chunks that are padding only are left out, unless all are.
    """
    with_rows = [chunk for chunk in chunks if chunk.shard is None or chunk.shard.rows > 0]
    joined = with_rows or list(chunks)
    is_tensordict = isinstance(joined[0], TensorDictRows)
    return DataProto.concat(joinable(joined) if is_tensordict else joined)
