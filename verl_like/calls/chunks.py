"""Chunks of a batch on their way: split per worker, passed on as references, joined again.

A batch, or the future of one, becomes one chunk per data-parallel rank; results become one batch. A
result keeps its pad rows while it stays among workers; its header says how many rows are real, and
whoever makes one batch of the chunks drops the rest. The cutting of rows is in
`verl_like.batch.split`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_like.batch.protocol import DataProto
from verl_like.batch.split import join_chunks, split_rows, view_rows
from verl_like.batch.tensordict_rows import rows_of, value_of
from verl_like.calls.future import WorkerFuture
from verl_like.calls.messages import Header
from verl_like.calls.target import CallTarget
from verl_like.errors import BatchError, DispatchError


@dataclass(frozen=True)
class FutureShard:
    """A chunk of a result that is still being made: it travels as a reference."""

    future: WorkerFuture
    index: int


def split_over(target: CallTarget, value: Any, name: str, num_chunks: int) -> list[Any]:
    """Chunks of a batch, or of the future of one, for `num_chunks` data-parallel ranks."""
    if isinstance(value, WorkerFuture):
        if value.can_be_passed_to(target.transport, num_chunks):
            return [FutureShard(value, i) for i in range(num_chunks)]
        value = value.batch()
    value = rows_of(value)
    if not isinstance(value, DataProto):
        raise DispatchError(
            f"{target.call_site}: {name} must be a DataProto or TensorDict (or the future of one) "
            f"to be split over {num_chunks} worker(s), got {type(value).__name__}. Put other "
            "values into meta_info, or register the method with Dispatch.ONE_TO_ALL."
        )
    if len(value) == 0:
        raise BatchError(
            f"{target.call_site}: {name} has no rows, nothing to split over {num_chunks} worker(s)."
        )
    return split_rows(value, num_chunks)


def drop_padding(payload: Any, header: Header) -> Any:
    """A payload without what the method made of pad rows.

    It shares storage and keeps the shard of its input.
    """
    if not isinstance(payload, DataProto) or header.rows in (None, len(payload)):
        return payload
    kept = view_rows(payload, 0, header.rows or 0)
    kept.shard = payload.shard
    return kept


def own_value(payload: Any, header: Header) -> Any:
    """What one rank has returned, without padding and in memory of its own."""
    value = drop_padding(payload, header)
    return value_of(value.slice(0, len(value)) if isinstance(value, DataProto) else value)


def collect_dataproto(target: CallTarget, outputs: list[Any]) -> DataProto:
    """One batch of the workers' batches, in rank order.

    Chunks of ranks that held padding only are left out.
    """
    if any(type(output) is not type(outputs[0]) for output in outputs):
        raise DispatchError(
            f"{target.call_site} returned a TensorDict on some ranks and a DataProto on others: "
            "return the same on all."
        )
    return join_chunks(outputs)
