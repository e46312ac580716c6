"""What a call has given whose group has lost a process: the pieces of the ranks that live.

    future = group.generate_sequences.remote(batch)
    try:
        return future.get()
    except WorkerDiedError:
        pieces = surviving_pieces(future)    # waits for the others; None is a piece that is lost

That is for methods whose ranks do not wait for each other. Ranks that get the same piece, those of
a tensor-parallel engine, do: the piece is lost with any of them, unless its result is there.
"""

from __future__ import annotations

from verl_like.batch.protocol import DataProto
from verl_like.calls.answers import wait_for_calls
from verl_like.calls.future import WorkerFuture
from verl_like.calls.messages import Pending
from verl_like.calls.pieces import real_rows
from verl_like.errors import DispatchError, WorkerDiedError


def has_lost_ranks(future: WorkerFuture) -> bool:
    """Whether a wait for this call has found that a rank of its group is gone."""
    return bool(_lost_ranks(future))


def pieces_there(future: WorkerFuture) -> set[int]:
    """The numbers of the pieces that waits for this call have found."""
    return {number for number in range(len(future.pieces)) if _is_there(future, number)}


def surviving_pieces(future: WorkerFuture) -> list[DataProto | None]:
    """The pieces of a batch in row order, without pad rows; None for those that are lost.

    Waits until the ranks that live have answered, as long as a call may take. What else fails is
    raised. Metrics beside the batch are left out, and columns are for reading: to join pieces
    copies them.
    """
    if future.form != "batch":
        raise DispatchError(f"{future.name} returns no batch, so it has no pieces that survive.")
    lost = _lost_pieces(future)
    while True:
        try:
            _wait_for_others(future, lost)
            break
        except WorkerDiedError:
            more = _lost_pieces(future)
            if more == lost:  # of another group, which this one cannot do without
                raise
            lost = more
    return [_fetch(future, pending, n in lost) for n, pending in enumerate(future.pieces)]


def _lost_ranks(future: WorkerFuture) -> set[int]:
    """Those that waits for this call have found gone."""
    failures = future.known.failures
    return {rank for rank, error in failures.items() if isinstance(error, WorkerDiedError)}


def _lost_pieces(future: WorkerFuture) -> set[int]:
    """Those of ranks that are gone and whose result is not there."""
    numbers = future.piece_numbers
    died = _lost_ranks(future)
    return {numbers[rank] for rank in died if not _is_there(future, numbers[rank])}


def _is_there(future: WorkerFuture, piece: int) -> bool:
    """Whether the rank that gives this piece has answered."""
    rank = future.pieces[piece].rank
    return rank in future.known.headers and rank not in future.known.failures


def _wait_for_others(future: WorkerFuture, lost: set[int]) -> None:
    """Until every piece is there that is not lost."""
    numbers = future.piece_numbers
    done = lost | pieces_there(future)
    others = [call for call in future.pending if numbers[call.rank] not in done]
    call = future.transport, future.name, others
    wait_for_calls(*call, rows=future.rows, known=future.known)


def _fetch(future: WorkerFuture, pending: Pending, is_lost: bool) -> DataProto | None:
    """A piece; one whose machine is gone with it is lost, too."""
    if is_lost:
        return None
    header = future.known.headers[pending.rank]
    try:
        payload = future.fetch_payload(pending)
    except WorkerDiedError:
        return None
    return real_rows(payload, header)
