"""What a maker made of a piece: references to its samples, until the trainer wants them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.detached.pieces import Order, Piece
from trainer.detached.scoring import Reading, join_readings
from trainer.loop import Metrics
from trainer.rollouts.trainer import with_responses
from verl_like.batch.protocol import DataProto


@dataclass
class Experience:
    """The samples of a piece, on the workers of their maker; `fetch` brings them to the driver."""

    piece: Piece
    maker: int
    version: int
    """Of the weights that the maker held when it began: no token is older."""
    uids: list[str]
    """One for each prompt."""
    rows: DataProto
    """The prompts, a row for each sample; after `fetch` the samples."""
    future: Any = field(default=None, repr=False)
    """Of `generate_sequences`; None once the samples are here."""
    readings: list[Reading] = field(default_factory=list, repr=False)
    """What the maker's roles say of them; none once that is here, or where trainers score."""
    metrics: Metrics = field(default_factory=dict)
    """Numbers that came with the readings, after `fetch`."""

    @classmethod
    def of(
        cls,
        order: Order,
        maker: int,
        rows: DataProto,
        future: Any = None,
        readings: Sequence[Reading] = (),
    ) -> Experience:
        """What the maker made of its order; without a `future` the rows are the samples."""
        return cls(order.piece, maker, order.version, order.uids, rows, future, list(readings))

    @property
    def num_samples(self) -> int:
        """Rows."""
        return self.piece.num_samples

    @property
    def is_made(self) -> bool:
        """Whether `fetch` waits for no worker."""
        futures = [reading.future for reading in self.readings]
        futures += [] if self.future is None else [self.future]
        return all(future.done() for future in futures)

    def fetch(self) -> DataProto:
        """The samples, and what was read of them, brought here at the first call."""
        if self.future is not None:
            self.rows = with_responses(self.rows, self.future.batch())
            self.future = None
        if self.readings:
            self.rows, self.metrics = join_readings(self.rows, self.readings)
            self.readings = []
        return self.rows
