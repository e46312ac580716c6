"""A moving average of the policy's weights, to validate with: `actor.ema_decay`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workers.models.state import own_part


class WeightAverage:
    """The exponential moving average of what a module trains, in float32, each rank its shards.

    `ActorWorker` moves it after every update, and puts it in the weights' place for a validation.
    Frozen weights and buffers are the module's own.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.module, self.decay = module, decay
        self.tensors = {name: weight.float().clone() for name, weight in self._weights().items()}
        self.put_aside: dict[str, Tensor] = {}
        """The weights themselves, while the average is in their place."""

    @torch.no_grad()
    def update(self) -> None:
        """Move to decay x average + (1 - decay) x weights."""
        for name, weight in self._weights().items():
            average = own_part(self.tensors[name])
            new = own_part(weight).to(average.device, average.dtype)
            average.lerp_(new, 1.0 - self.decay)

    def put_in_place(self) -> None:
        """Compute with the average from now on."""
        weights = self._weights()
        self.put_aside = {name: weight.clone() for name, weight in weights.items()}
        _copy(self.tensors, weights)

    def take_out(self) -> None:
        """Compute with the weights again, which are bit for bit as they were."""
        _copy(self.put_aside, self._weights())
        self.put_aside = {}

    def restart(self) -> None:
        """Forget the past: the average is the weights as they are."""
        _copy(self._weights(), self.tensors)

    def _weights(self) -> dict[str, Tensor]:
        named = self.module.named_parameters()
        return {name: weight.detach() for name, weight in named if weight.requires_grad}


@torch.no_grad()
def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    for name, tensor in source.items():
        own_part(target[name]).copy_(own_part(tensor))
