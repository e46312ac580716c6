"""A moving average of the policy's weights for validation: `actor.ema_decay`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.models.state import local_shard


class WeightAverage:
    """Exponential moving average of a module's trained weights, in float32; each rank has its
    shards.

    `ActorWorker` updates it after every update and swaps it in for a validation. Frozen weights and
    buffers are those of the module.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.module, self.decay = module, decay
        self.tensors = {name: weight.float().clone() for name, weight in self._weights().items()}
        self.put_aside: dict[str, Tensor] = {}
        """The trained weights, while the average is swapped in."""

    @torch.no_grad()
    def update(self) -> None:
        """Move to decay x average + (1 - decay) x weights."""
        for name, weight in self._weights().items():
            average = local_shard(self.tensors[name])
            new = local_shard(weight).to(average.device, average.dtype)
            average.lerp_(new, 1.0 - self.decay)

    def swap_in(self) -> None:
        """Swap the average in."""
        weights = self._weights()
        self.put_aside = {name: weight.clone() for name, weight in weights.items()}
        _copy(self.tensors, weights)

    def swap_out(self) -> None:
        """Swap the weights back in, bit for bit."""
        _copy(self.put_aside, self._weights())
        self.put_aside = {}

    def restart(self) -> None:
        """Reset the average to the current weights."""
        _copy(self._weights(), self.tensors)

    def _weights(self) -> dict[str, Tensor]:
        named = self.module.named_parameters()
        return {name: weight.detach() for name, weight in named if weight.requires_grad}


@torch.no_grad()
def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    for name, tensor in source.items():
        local_shard(target[name]).copy_(local_shard(tensor))
