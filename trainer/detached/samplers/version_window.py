"""Only samples of the last `detached.window` versions; older ones are dropped and made up for."""

from __future__ import annotations

from trainer.detached.samplers.registry import SAMPLERS, Choice, Sampler, Stock, up_to


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
