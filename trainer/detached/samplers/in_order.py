"""The order of the prompts: what the synchronous run does, whoever is ready first."""

from __future__ import annotations

from trainer.detached.samplers.registry import SAMPLERS, Choice, Sampler, Stock, up_to


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
