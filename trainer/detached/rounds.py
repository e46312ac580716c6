"""Rounds of a detached run: which batch a step trains on.

With `update_steps` U and `train_epochs` E a round has U x E steps: U fresh batches in the order in
which they arrive, then the same batches E - 1 more times, each time in a new order. A new version
of the weights ends the round.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rounds:
    """How often a batch is trained on, and how many batches belong to one weight version."""

    update_steps: int
    train_epochs: int
    seed: int

    @property
    def length(self) -> int:
        """Steps per round."""
        return self.update_steps * self.train_epochs

    def place(self, step: int) -> tuple[int, int, int]:
        """Return (round, epoch, batch) of a step. Steps count from 1, the result from 0."""
        number, place = divmod(step - 1, self.length)
        return number, *divmod(place, self.update_steps)

    def is_fresh(self, step: int) -> bool:
        """Return whether this step trains on a batch for the first time."""
        return self.place(step)[1] == 0

    def batch_of(self, step: int) -> int:
        """The place of the step's batch among the fresh batches of its round."""
        number, epoch, place = self.place(step)
        return self.order(number, epoch)[place]

    def order(self, number: int, epoch: int) -> list[int]:
        """The order of a round's batches in that epoch; the first epoch keeps their arrival."""
        if epoch == 0:
            return list(range(self.update_steps))
        order = np.random.default_rng([self.seed, number, epoch]).permutation(self.update_steps)
        return [int(batch) for batch in order]

    def num_fresh(self, steps: int) -> int:
        """Count the fresh batches of the run's first `steps` steps."""
        whole, rest = divmod(steps, self.length)
        return whole * self.update_steps + min(rest, self.update_steps)

    def ends_with(self, step: int) -> bool:
        """Return whether this step is the last one of its round."""
        return step % self.length == 0
