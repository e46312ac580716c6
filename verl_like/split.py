"""Cutting a `DataProto` into one piece per worker, and making one batch of the pieces that come back.

A batch of N rows over n workers becomes n contiguous pieces of ceil(N / n) rows. Where that does not come out even, the
last pieces are filled with copies of the first rows; `Shard` marks them (the last rows of a piece), the engines give
them no weight, and the host drops their results. The caller's batch is never touched. Used by `verl_like.dispatch` on
the driver and by `verl_like.host` in workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from verl_like.errors import BatchError, DispatchError
from verl_like.future import DataProtoFuture, PartFuture
from verl_like.protocol import DataProto, Shard
from verl_like.transport import Header

if TYPE_CHECKING:
    from verl_like.worker_group import WorkerGroup


@dataclass(frozen=True)
class FutureShard:
    """Piece `index` of `count` of a result that is still being made: it travels as references."""

    future: DataProtoFuture
    index: int
    count: int


def split_over(group: WorkerGroup, value: Any, name: str, num_pieces: int) -> list[Any]:
    """Pieces of a batch, or of the future of one, for `num_pieces` data-parallel ranks."""
    if isinstance(value, DataProtoFuture):
        return [FutureShard(value, i, num_pieces) for i in range(num_pieces)]
    if isinstance(value, PartFuture):
        value = value.get()
    if not isinstance(value, DataProto):
        raise DispatchError(
            f"{group.call_site}: {name} must be a DataProto (or the future of one) to be split over {num_pieces} "
            "workers, "
            f"got {type(value).__name__}. Put other values into meta_info, or register the method with "
            "Dispatch.ONE_TO_ALL."
        )
    if len(value) == 0:
        raise BatchError(f"{group.call_site}: {name} has no rows, nothing to split over {num_pieces} workers.")
    return split_rows(value, num_pieces)


def split_rows(data: DataProto, num_pieces: int) -> list[DataProto]:
    """`num_pieces` contiguous pieces of equal length, the last ones padded and marked.

    Pieces without pad rows share storage.
    """
    total = len(data)
    size = -(-total // num_pieces)
    pieces = []
    for index in range(num_pieces):
        start, stop = min(index * size, total), min((index + 1) * size, total)
        if stop - start == size:
            piece = view_rows(data, start, stop)
        else:
            piece = data.select_idxs([*range(start, stop), *(i % total for i in range(size - (stop - start)))])
        piece.shard = Shard(index=index, count=num_pieces, start=start, rows=stop - start, total=total)
        pieces.append(piece)
    return pieces


def view_rows(data: DataProto, start: int, stop: int) -> DataProto:
    """Rows [start, stop) that share the batch's storage: for sending and reading only."""
    batch = None if data.batch is None else data.batch[start:stop]
    return DataProto(batch, {key: column[start:stop] for key, column in data.non_tensor_batch.items()}, data.meta_info)


def place_piece(piece: DataProto, index: int, rows_of_all: Sequence[int]) -> DataProto:
    """Give a piece that came straight from another group its `Shard`, padded to the longest piece's length."""
    rows, longest = len(piece), max(rows_of_all)
    if rows == 0 and longest > 0:
        raise BatchError(
            f"piece {index} of {len(rows_of_all)} has no rows (rows per piece: {list(rows_of_all)}), so it cannot be "
            "padded with its "
            "own rows. Fetch the batch with .get() and pass it on, or use fewer workers."
        )
    if rows < longest:
        piece = piece.select_idxs([*range(rows), *(i % rows for i in range(longest - rows))])
    piece.shard = Shard(
        index=index, count=len(rows_of_all), start=sum(rows_of_all[:index]), rows=rows, total=sum(rows_of_all)
    )
    return piece


def drop_pad_rows(result: Any, shard: Shard | None, given_rows: int, where: str) -> Any:
    """A method's result without what it made of pad rows.

    A method may return a whole multiple of the rows it was given.
    """
    if shard is None or not isinstance(result, DataProto) or shard.rows == given_rows or len(result) == 0:
        return result
    if len(result) % given_rows:
        raise DispatchError(
            f"{where} returned {len(result)} rows for {given_rows} ({given_rows - shard.rows} of them padding): "
            "results of padded "
            "calls must have the rows of the input or a whole multiple of them, so that padding can be dropped."
        )
    return view_rows(result, 0, shard.rows * (len(result) // given_rows))


def collect_dataproto(group: WorkerGroup, outputs: list[Any]) -> DataProto:
    """One batch of the workers' batches, in rank order. Pieces of ranks that held padding only are left out."""
    for rank, output in enumerate(outputs):
        if not isinstance(output, DataProto):
            raise DispatchError(
                f"{group.call_site} returned {type(output).__name__} on rank {rank}; a data-parallel method must "
                "return a DataProto."
            )
    real = [output for output in outputs if output.shard is None or output.shard.rows > 0]
    kept = real or outputs
    return DataProto.concat(kept) if len(kept) > 1 else kept[0].writable_copy()


def regroup_pieces(headers: Sequence[Header], payloads: Sequence[Any], num_pieces: int) -> list[tuple[Any, Header]]:
    """The rows of some pieces in `num_pieces` pieces, each with a header; an error among them goes into every piece."""
    failed = next((h for h in headers if h.error is not None), None)
    if failed is not None:
        return [(None, failed)] * num_pieces
    whole = DataProto.concat([p for p in payloads if len(p)] or list(payloads))
    cut = whole.chunk(num_pieces)
    return [(piece, replace(headers[0], rows=len(piece), mesh_facts=None)) for piece in cut]
