"""Whatever was ready first: no batch waits for a slow piece, unless that would grow too old."""

from __future__ import annotations

from trainer.detached.samplers.registry import (
    SAMPLERS,
    Choice,
    Sampler,
    Stock,
    most_urgent_first,
    up_to,
)


@SAMPLERS.register("ready_first")
class ReadyFirst(Sampler):
    """Long responses come later than short ones: a batch's lengths are biased by its place."""

    def choose(self, stock: Stock) -> Choice:
        """The first to come, after those that would be too old for the batch after this one."""
        ordered = most_urgent_first(stock, stock.ready)
        return Choice() if ordered is None else Choice(up_to(ordered, stock.num_samples))
