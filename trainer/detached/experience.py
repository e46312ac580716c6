"""What a maker made of a piece: references to its samples, until the trainer wants them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainer.detached.pieces import Order, Piece
from trainer.ppo.sampling import with_responses
from verl_like.batch.protocol import DataProto
from verl_like.calls.metrics import batch_alone


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

    @classmethod
    def of(cls, order: Order, maker: int, rows: DataProto, future: Any = None) -> Experience:
        """What the maker made of its order; without a `future` the rows are the samples."""
        return cls(order.piece, maker, order.version, order.uids, rows, future)

    @property
    def num_samples(self) -> int:
        """Rows."""
        return self.piece.num_samples

    def fetch(self) -> DataProto:
        """The samples, brought here at the first call."""
        if self.future is not None:
            self.rows = with_responses(self.rows, batch_alone(self.future.get()))
            self.future = None
        return self.rows
