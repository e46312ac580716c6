"""A generation whose rollout group loses a process: samples that are there stay.

    samples = generate(trainer.groups["rollout"], prompts, replace=trainer.replace_rollout)

Decoding issues no collective, so the other ranks make theirs to the end; those of the lost rank are
made by the group that comes in its place, with the weights that it had. A sample does not depend on
who makes it, nor on what is made beside it: the batch is the one of a group that lost nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_like.batch.protocol import DataProto
from verl_like.batch.split import split_rows
from verl_like.calls.future import WorkerFuture
from verl_like.calls.survivors import has_lost_ranks, pieces_there, surviving_pieces
from verl_like.errors import LostSamplesError, WorkerDiedError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeptSamples:
    """What is there of the samples of a batch."""

    rows: list[int]
    """Their numbers in the batch."""
    samples: DataProto | None
    """None where there are none."""
    lost_rows: list[int]
    """The other numbers."""

    def with_later(self, later: KeptSamples) -> KeptSamples:
        """Together with what was made `later` of the rows that are lost here."""
        rows = [*self.rows, *(self.lost_rows[row] for row in later.rows)]
        parts = [samples for samples in (self.samples, later.samples) if samples is not None]
        lost_rows = [self.lost_rows[row] for row in later.lost_rows]
        return KeptSamples(rows, DataProto.concat(parts) if parts else None, lost_rows)

    def whole(self) -> DataProto:
        """All samples in the order of their rows, once none is lost."""
        assert self.samples is not None, "samples of a batch with rows"
        return self.samples.select_idxs(np.argsort(self.rows))


Replace = Callable[[LostSamplesError, KeptSamples], Any]
"""Gives the group that comes in the place of the lost one; raises where there is none."""


def generate(group: Any, batch: DataProto, replace: Replace | None = None) -> DataProto:
    """`group.generate_sequences(batch)`, also where the group loses a process meanwhile.

    Without `replace` an error then names the samples that are lost, at once.
    """
    kept = KeptSamples([], None, [*range(len(batch))])
    while True:
        asked = batch.select_idxs(kept.lost_rows) if kept.rows else batch
        future = group.generate_sequences.remote(asked)
        try:
            samples: DataProto = future.get()
            return samples if not kept.rows else kept.with_later(all_of(samples)).whole()
        except WorkerDiedError as error:
            lost = _lost_samples(future, asked, error)
            if replace is None or not has_lost_ranks(future):
                raise lost from error
            logger.warning("%s The other ranks finish their samples.", error)
            found = keep_samples(future, asked)
            kept = kept.with_later(found)
            if not kept.lost_rows:
                return kept.whole()
            group = replace(lost, found)


def all_of(samples: DataProto) -> KeptSamples:
    """Of a batch that lost nothing."""
    return KeptSamples([*range(len(samples))], samples, [])


def keep_samples(future: WorkerFuture, batch: DataProto) -> KeptSamples:
    """The samples of the ranks that live, once they have made them."""
    pieces = surviving_pieces(future)
    numbers = np.arange(len(batch))
    rows: list[int] = []
    there: list[DataProto] = []
    for asked, made in zip(split_rows(batch, len(pieces)), pieces, strict=True):
        if made is not None and asked.num_real_rows:
            rows += _numbers(asked)
            there.append(made)
    lost = np.delete(numbers, rows).tolist()
    return KeptSamples(rows, DataProto.concat(there) if there else None, lost)


def _numbers(piece: DataProto) -> range:
    """Those of a piece's rows in the whole batch."""
    assert piece.shard is not None, "pieces that were split have one"
    return range(piece.shard.start, piece.shard.start + piece.shard.rows)


def _lost_samples(future: WorkerFuture, batch: DataProto, error: Exception) -> LostSamplesError:
    """The error that names the samples that are not there."""
    there, lost = pieces_there(future), []
    for number, piece in enumerate(split_rows(batch, len(future.pieces))):
        if number not in there:
            uids, indices = piece.non_tensor_batch["uid"], piece.batch["sample_index"].tolist()
            rows = [f"{uid}/{index}" for uid, index in zip(uids, indices, strict=True)]
            lost += rows[: piece.num_real_rows]
    return LostSamplesError(
        f"rollout: {error} Of {len(batch)} samples {len(lost)} (uid/index) were not finished: "
        f"{', '.join(lost)}. Generating them again gives the same samples."
    )
