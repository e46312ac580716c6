"""Rounds of an asynchronous run: which batch a step trains on.

With `update_steps` U and `train_epochs` E a round has U x E steps: U fresh batches in the order in
which they arrive, then the same batches E - 1 more times, each time in a new order. A new version
of the weights ends the round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from trainer.async_training.config import AsyncConfig


@dataclass(frozen=True)
class Demand:
    """Samples that the trainer waits for, and samples that it will need later."""

    num_samples: int = 0
    attempt: int = 0
    rest_of_version: int = 0
    """Fresh samples needed after these and before the next version of the weights."""
    rest_of_run: int | None = None
    """Fresh samples needed after these; None: unknown."""


@dataclass(frozen=True)
class Rounds:
    """How often a batch is trained on, and how many batches belong to one weight version."""

    update_steps: int
    train_epochs: int
    seed: int
    max_staleness: int = 0
    has_filter: bool = False
    """Whether nobody knows how many samples a step needs: `algorithm.filter_groups`."""

    @classmethod
    def of(cls, config: AsyncConfig) -> Rounds:
        """The rounds of a run."""
        async_training = config.async_training
        return cls(
            update_steps=async_training.update_steps,
            train_epochs=async_training.train_epochs,
            seed=config.trainer.seed,
            max_staleness=async_training.max_staleness,
            has_filter=config.algorithm.filter_groups.enable,
        )

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

    def demand(
        self, step: int, total_steps: int, samples_of: Callable[[int], int], attempt: int = 0
    ) -> Demand:
        """Return the samples of one draw of a step, and those that later steps will need.

        `samples_of` returns the number of samples in one of the loader's batches.
        """
        batch, place = self.num_fresh(step) - 1, self.place(step)[2]
        last_of_version = batch + self.update_steps - place
        rest_of_run = None
        if not self.has_filter:
            total = self.num_fresh(total_steps)
            last_of_version = min(last_of_version, total)
            # generators may run ahead no further than this: the bound of staleness is lower there
            ahead = (self.max_staleness + 1) * self.update_steps
            rest_of_run = sum(map(samples_of, range(batch + 1, min(total, batch + 1 + ahead))))
        rest_of_version = sum(map(samples_of, range(batch + 1, last_of_version)))
        return Demand(samples_of(batch), attempt, rest_of_version, rest_of_run)
