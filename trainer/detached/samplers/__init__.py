"""Samplers: which of the buffer's experiences become the next batch."""

from trainer.detached.samplers import in_order, random_order, ready_first, version_window
from trainer.detached.samplers.registry import SAMPLERS, Choice, Sampler, Stock

__all__ = [
    "SAMPLERS",
    "Choice",
    "Sampler",
    "Stock",
    "in_order",
    "random_order",
    "ready_first",
    "version_window",
]
