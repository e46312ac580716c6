"""Linear layers of the direct forward pass: torch's, oneDNN's on a CPU in float32, or int8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from workers.models.quantize import Int8Weight

MIN_ROWS = 4
"""Fewest rows of a pass: below, a linear layer's bits change with the number of rows."""
MIN_ROWS_OF_MKL = 16
"""The same for torch's float32 products on a CPU: MKL has kernels for few rows on Intel's."""
SIMD_WIDTH = 32
"""Numbers that an exponential takes at a time; the rest of a tensor is computed in another way."""


class TorchLinear:
    """A linear layer on states [rows, in], and what a decoder layer does with its result.

    Its bits for a row do not depend on the other rows, from `MIN_ROWS_OF_MKL` rows on.
    """

    def __init__(self, layer: Any) -> None:
        self.weight: Tensor = layer.weight.detach()
        self.bias: Tensor | None = None if layer.bias is None else layer.bias.detach()

    def __call__(self, states: Tensor) -> Tensor:
        """The layer's result."""
        return linear(states, self.weight, self.bias)

    def silu(self, states: Tensor) -> Tensor:
        """silu of the layer's result."""
        # In whole vectors, so that every number of a row is computed in the same way.
        width = len(self.weight)
        padded = states.new_zeros(len(states), -(-width // SIMD_WIDTH) * SIMD_WIDTH)
        padded[:, :width] = self(states)
        return silu(padded, inplace=True)[:, :width]

    def times(self, other: Tensor, states: Tensor) -> Tensor:
        """The layer's result times `other`, which may be written over."""
        return other.mul_(self(states))

    def added_to(self, other: Tensor, states: Tensor) -> Tensor:
        """The layer's result plus `other`, which may be written over."""
        other.addmm_(states, self.weight.t())
        return other if self.bias is None else other.add_(self.bias)


class OnednnLinear(TorchLinear):
    """The same through oneDNN, each method in one pass over memory, and from `MIN_ROWS` rows on."""

    def __init__(self, layer: Any) -> None:
        from workers.cpu import onednn

        super().__init__(layer)
        self.onednn = onednn

    def __call__(self, states: Tensor) -> Tensor:
        """The layer's result."""
        return self.onednn.linear(states, self.weight, self.bias)

    def silu(self, states: Tensor) -> Tensor:
        """silu of the layer's result."""
        return self.onednn.linear_silu(states, self.weight, self.bias)

    def times(self, other: Tensor, states: Tensor) -> Tensor:
        """The layer's result times `other`."""
        return self.onednn.linear_binary("mul", other, states, self.weight, self.bias)

    def added_to(self, other: Tensor, states: Tensor) -> Tensor:
        """The layer's result plus `other`."""
        return self.onednn.linear_binary("add", other, states, self.weight, self.bias)


class Int8Linear(TorchLinear):
    """The same with a weight of int8: torch's sums into another tensor know no such weight."""

    def added_to(self, other: Tensor, states: Tensor) -> Tensor:
        """The layer's result plus `other`, which may be written over."""
        return other.add_(self(states))


def build_linear(layer: Any) -> TorchLinear:
    """The fastest of the three that computes this layer."""
    if isinstance(layer.weight, Int8Weight):
        return Int8Linear(layer)
    if layer.weight.device.type != "cpu":
        return TorchLinear(layer)  # workers.cpu is not even imported on a GPU
    from workers.cpu import onednn

    return OnednnLinear(layer) if onednn.supports(layer.weight) else TorchLinear(layer)


def least_rows(weight: Tensor, is_direct: bool) -> int:
    """Fewest rows of a pass through layers of such weights, by the direct pass or the module's."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return MIN_ROWS
    from workers.cpu import onednn

    return MIN_ROWS if is_direct and onednn.supports(weight) else MIN_ROWS_OF_MKL
