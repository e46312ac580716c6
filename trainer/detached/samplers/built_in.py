"""The samplers that a run can name: in_order, ready_first, random, version_window."""

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


@SAMPLERS.register("in_order")
class InOrder(Sampler):
    """Waits for a slow piece."""

    def choose(self, stock: Stock) -> Choice:
        """The lowest piece numbers, once all of them are there."""
        ready = sorted(stock.ready, key=lambda one: one.piece.number)
        taken = up_to(ready, stock.num_samples)
        if not taken:
            return Choice()
        last = taken[-1].piece.number
        waits = any(piece.number < last for piece, _ in stock.coming)
        return Choice() if waits else Choice(taken)


@SAMPLERS.register("random")
class RandomOrder(Sampler):
    """Drawn by the run's seed and the batch's number, without replacement."""

    def choose(self, stock: Stock) -> Choice:
        """Any that are ready, after those that would be too old for the batch after this one."""
        order = np.random.default_rng(list(stock.seed)).permutation(len(stock.ready))
        shuffled = [stock.ready[place] for place in order]
        ordered = most_urgent_first(stock, shuffled)
        return Choice() if ordered is None else Choice(up_to(ordered, stock.num_samples))


@SAMPLERS.register("ready_first")
class ReadyFirst(Sampler):
    """Long responses come later than short ones: a batch's lengths are biased by its place."""

    def choose(self, stock: Stock) -> Choice:
        """The first to come, after those that would be too old for the batch after this one."""
        ordered = most_urgent_first(stock, stock.ready)
        return Choice() if ordered is None else Choice(up_to(ordered, stock.num_samples))


@SAMPLERS.register("version_window")
class VersionWindow(Sampler):
    """A bound that discards, inside the bound that paces (`detached.max_staleness`)."""

    def choose(self, stock: Stock) -> Choice:
        """The first to come within the window, the oldest versions first."""
        window = stock.max_staleness if stock.window is None else stock.window
        oldest = stock.version - window
        reason = f"older than {window} versions"
        dropped = [(one, reason) for one in stock.ready if one.version < oldest]
        inside = [one for one in stock.ready if one.version >= oldest]
        inside.sort(key=lambda one: one.version)
        return Choice(up_to(inside, stock.num_samples), dropped)
