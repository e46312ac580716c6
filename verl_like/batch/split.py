"""Cutting a `DataProto` into one piece per worker, and making one batch of the pieces that come
back.

A batch of N rows over n workers becomes n contiguous pieces of ceil(N / n) rows. Where that does
not come out even, the last pieces are filled with copies of the first rows; `Shard` marks them (the
last rows of a piece) and the engines give them no weight. A result keeps its pad rows while it
stays among workers; its header says how many rows are real, and whoever makes one batch of the
pieces drops the rest. The caller's batch is never touched. Used by `verl_like.calls.dispatch` and
`verl_like.calls.group` on the driver and by `verl_like.process.host` in workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from verl_like.batch.protocol import DataProto, Shard
from verl_like.calls.future import PartFuture, WorkerFuture
from verl_like.calls.metrics import batch_alone
from verl_like.calls.transport import Header
from verl_like.errors import BatchError, DispatchError

if TYPE_CHECKING:
    from verl_like.calls.group import WorkerGroup


@dataclass(frozen=True)
class FutureShard:
    """Piece `index` of `count` of a result that is still being made: it travels as references."""

    future: WorkerFuture | PartFuture
    index: int
    count: int


def split_over(group: WorkerGroup, value: Any, name: str, num_pieces: int) -> list[Any]:
    """Pieces of a batch, or of the future of one, for `num_pieces` data-parallel ranks."""
    if isinstance(value, WorkerFuture | PartFuture):
        if value.travels_on(group.transport):
            return [FutureShard(value, i, num_pieces) for i in range(num_pieces)]
        value = batch_alone(value.get())
    if not isinstance(value, DataProto):
        raise DispatchError(
            f"{group.call_site}: {name} must be a DataProto (or the future of one) to be split "
            f"over {num_pieces} worker(s), got {type(value).__name__}. Put other values into "
            "meta_info, or register the method with Dispatch.ONE_TO_ALL."
        )
    if len(value) == 0:
        raise BatchError(
            f"{group.call_site}: {name} has no rows, nothing to split over {num_pieces} worker(s)."
        )
    return split_rows(value, num_pieces)


def split_rows(data: DataProto, num_pieces: int) -> list[DataProto]:
    """Contiguous pieces of equal length, the last ones padded and marked; pieces without pad rows
    share storage.
    """
    total = len(data)
    size = -(-total // num_pieces)
    pieces = []
    for index in range(num_pieces):
        start, stop = min(index * size, total), min((index + 1) * size, total)
        if stop - start == size:
            piece = view_rows(data, start, stop)
        else:
            piece = data.select_idxs(
                [*range(start, stop), *(i % total for i in range(size - (stop - start)))]
            )
        piece.shard = Shard(
            index=index, count=num_pieces, start=start, rows=stop - start, total=total
        )
        pieces.append(piece)
    return pieces


def view_rows(data: DataProto, start: int, stop: int) -> DataProto:
    """Rows [start, stop) that share the batch's storage: for sending and reading only."""
    batch = None if data.batch is None else data.batch[start:stop]
    return DataProto(
        batch,
        {key: column[start:stop] for key, column in data.non_tensor_batch.items()},
        data.meta_info,
    )


def place_piece(piece: DataProto, index: int, rows_of_all: Sequence[int]) -> DataProto:
    """Give a piece that came straight from another group its `Shard`, and the longest piece's
    length.
    """
    rows, longest = rows_of_all[index], max(rows_of_all)
    if len(piece) >= longest:
        placed = view_rows(piece, 0, longest)
    elif len(piece) == 0:
        raise BatchError(
            f"piece {index} of {len(rows_of_all)} has no rows (rows per piece: "
            f"{list(rows_of_all)}), so it cannot be padded with its own rows. Fetch the batch "
            "with .get() and pass it on, or use fewer workers."
        )
    else:
        placed = piece.select_idxs([i % len(piece) for i in range(longest)])
    placed.shard = Shard(
        index=index,
        count=len(rows_of_all),
        start=sum(rows_of_all[:index]),
        rows=rows,
        total=sum(rows_of_all),
    )
    return placed


def count_real_rows(result: DataProto, given_rows: int, where: str) -> int:
    """Rows of a method's result that do not come from pad rows: of k rows per row given, k per real
    one.

    `result.shard` is that of the piece of `given_rows` rows that the method got.
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


def drop_padding(payload: Any, header: Header) -> Any:
    """A payload without what the method made of pad rows; shares storage and keeps the shard of its
    input.
    """
    if not isinstance(payload, DataProto) or header.rows in (None, len(payload)):
        return payload
    kept = view_rows(payload, 0, header.rows or 0)
    kept.shard = payload.shard
    return kept


def collect_dataproto(group: WorkerGroup, outputs: list[Any]) -> DataProto:
    """One batch of the workers' batches, in rank order.

    Pieces of ranks that held padding only are left out.
    """
    for rank, output in enumerate(outputs):
        if not isinstance(output, DataProto):
            raise DispatchError(
                f"{group.call_site} returned {type(output).__name__} on rank {rank}; a "
                "data-parallel method must return a DataProto, (DataProto, metrics) or a dict of "
                "metrics. To collect one value per rank, register it with "
                "Dispatch.DP_COMPUTE_METRIC."
            )
    return join_pieces(outputs)


def join_pieces(pieces: Sequence[DataProto]) -> DataProto:
    """The rows of all pieces in memory of their own."""
    kept = [piece for piece in pieces if piece.shard is None or piece.shard.rows > 0] or list(
        pieces
    )
    return DataProto.concat(kept)


def regroup_pieces(
    headers: Sequence[Header], payloads: Sequence[Any], num_pieces: int, even: bool
) -> list[tuple[Any, Header]]:
    """The rows of some pieces in `num_pieces` pieces, each with a header; an error among them goes
    into every piece.

    Even pieces are those of `split_rows`, padded; otherwise they are those of `DataProto.chunk`.
    """
    failed = next((h for h in headers if h.error is not None), None)
    if failed is not None:
        return [(None, failed)] * num_pieces
    whole = join_pieces(
        [drop_padding(require_batch(p, h), h) for p, h in zip(payloads, headers, strict=True)]
    )
    cut = split_rows(whole, num_pieces) if even else whole.chunk(num_pieces)
    return [(piece, _header_of_piece(headers[0], piece, rank)) for rank, piece in enumerate(cut)]


def _header_of_piece(header: Header, piece: DataProto, rank: int) -> Header:
    """A header for a piece that was cut again: metrics and mesh facts stay with the call itself."""
    return replace(header, rows=piece.num_real_rows, rank=rank, mesh_facts=None, metrics=None)


def require_batch(payload: Any, header: Header) -> DataProto:
    """The payload of a call that had to return a batch."""
    if not isinstance(payload, DataProto):
        returned = "metrics alone" if header.metrics is not None else type(payload).__name__
        raise DispatchError(
            f"{header.role}.{header.method} returned {returned} on rank {header.rank}; its "
            "future was passed on as a batch, so it must return a DataProto."
        )
    return payload
