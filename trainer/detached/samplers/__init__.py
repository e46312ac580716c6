"""Samplers: which of the buffer's experiences become the next batch."""

from trainer.detached.samplers import built_in
from trainer.detached.samplers.registry import SAMPLERS, Choice, Sampler, Stock

__all__ = ["SAMPLERS", "Choice", "Sampler", "Stock", "built_in"]
