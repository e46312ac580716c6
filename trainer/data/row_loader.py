"""Endless rows in an order from the seed, as batches: for recipes whose rows are not prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainer.data.row_digest import OTHER_ROWS, digest_of_rows
from verl_like.batch.protocol import DataProto
from verl_like.errors import CheckpointError

R = TypeVar("R")
MakeBatch = Callable[[Sequence[R], Sequence[str]], DataProto]
"""(rows, their uids) -> a batch."""


class RowLoader(Generic[R]):
    """Endless rows, epoch after epoch in an order from the seed; a resumed one goes on in place."""

    def __init__(self, rows: Sequence[R], seed: int, make_batch: MakeBatch[R]) -> None:
        """`make_batch` pads rows, with their uids, to one batch."""
        self.rows, self._seed, self.make_batch = rows, seed, make_batch
        self._num_taken = 0

    def take(self, count: int) -> DataProto:
        """The next rows as a batch, with uids of their epochs."""
        places = [divmod(self._num_taken + number, len(self.rows)) for number in range(count)]
        orders = {epoch: self._order(epoch) for epoch, _ in places}
        chosen = [(int(orders[epoch][place]), epoch) for epoch, place in places]
        self._num_taken += count

        names = [f"{number}-{epoch}" for number, epoch in chosen]
        return self.make_batch([self.rows[number] for number, _ in chosen], names)

    def __len__(self) -> int:
        """Rows in an epoch."""
        return len(self.rows)

    @property
    def epoch(self) -> int:
        """That of the row which was taken last, the first being 0."""
        return max(self._num_taken - 1, 0) // len(self.rows)

    def _order(self, epoch: int) -> NDArray[np.int64]:
        return np.random.default_rng([self._seed, epoch]).permutation(len(self.rows))

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands; with the seed in the config, all that a resume needs."""
        return {
            "num_taken": self._num_taken,
            "num_rows": len(self.rows),
            "rows": self._digest,
        }

    @cached_property
    def _digest(self) -> str:
        return digest_of_rows(self.rows)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to where `state` was taken; other rows are refused."""
        if state["num_rows"] != len(self.rows):
            raise CheckpointError(
                "The saved position is one among other rows (saved "
                f"{state['num_rows']} of them, now {len(self.rows)}). {OTHER_ROWS}"
            )
        if state["rows"] != self._digest:
            raise CheckpointError(
                f"The saved position is one among other rows: as many ({len(self.rows)}), but of "
                f"other contents or in another order. {OTHER_ROWS}"
            )
        self._num_taken = state["num_taken"]
