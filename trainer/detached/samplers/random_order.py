"""A random choice among what the buffer holds, as a replay buffer makes it."""

from __future__ import annotations

import numpy as np

from trainer.detached.samplers.registry import (
    SAMPLERS,
    Choice,
    Sampler,
    Stock,
    most_urgent_first,
    up_to,
)


@SAMPLERS.register("random")
class RandomOrder(Sampler):
    """Drawn by the run's seed and the batch's number, without replacement."""

    def choose(self, stock: Stock) -> Choice:
        """Any that are ready, after those that would be too old for the batch after this one."""
        order = np.random.default_rng(list(stock.seed)).permutation(len(stock.ready))
        shuffled = [stock.ready[place] for place in order]
        ordered = most_urgent_first(stock, shuffled)
        return Choice() if ordered is None else Choice(up_to(ordered, stock.num_samples))
