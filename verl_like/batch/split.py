"""Split the rows of a `DataProto` into one chunk per worker, and join chunks again.

A batch of N rows over n workers becomes n contiguous chunks of ceil(N / n) rows. If n does not
divide N, the last chunks are filled with copies of the batch's first rows. `Shard` marks these
copies, the last rows of a chunk, and the engines give them no weight. The caller's batch is never
changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from verl_like.batch.protocol import DataProto, Shard
from verl_like.errors import BatchError, DispatchError


class RowsOfPart(NamedTuple):
    """A chunk as rows of a part of the batch; several workers get the part, and take their rows."""

    part: DataProto
    start: int
    """Number of the chunk's first row within the part."""
    shard: Shard


def split_into_parts(
    data: DataProto, num_chunks: int, per_part: int
) -> list[DataProto | RowsOfPart]:
    """Return contiguous chunks of equal length, the last ones padded and marked.

    `per_part` neighbors without pad rows share a part of the batch, and the parts share its
    storage. To pickle a part takes about as long as to pickle one chunk.
    """
    total = len(data)
    size = -(-total // num_chunks)
    of_part = size * per_part
    parts = [data.select()] if of_part >= total else data.views(of_part)
    chunks: list[DataProto | RowsOfPart] = []
    for index in range(num_chunks):
        start = min(index * size, total)
        rows = min(size, total - start)
        shard = Shard(index=index, count=num_chunks, start=start, rows=rows, total=total)
        if rows == size:
            chunks.append(RowsOfPart(parts[start // of_part], start % of_part, shard))
            continue
        padding = [row % total for row in range(size - rows)]
        chunk = data.select_idxs([*range(start, start + rows), *padding])
        chunk.shard = shard
        chunks.append(chunk)
    return chunks


def take_rows(part: DataProto, start: int, shard: Shard) -> DataProto:
    """Return a chunk, which shares the storage of its part."""
    chunk = view_rows(part, start, start + shard.rows)
    chunk.shard = shard
    return chunk


def split_rows(data: DataProto, num_chunks: int) -> list[DataProto]:
    """Return the chunks of `split_into_parts` as batches."""
    chunks = split_into_parts(data, num_chunks, per_part=1)
    return [take_rows(*chunk) if isinstance(chunk, RowsOfPart) else chunk for chunk in chunks]


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
    return DataProto.concat(with_rows or list(chunks))
