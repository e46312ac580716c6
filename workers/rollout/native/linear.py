"""Linear layers of the direct forward pass: torch's, oneDNN's on a CPU in float32, or int8."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from workers.models.quantize import Int8Weight

MIN_ROWS = 4
"""Fewest rows of a pass: below it, a linear layer's bits change with the number of rows."""
MIN_ROWS_OF_MKL = 16
"""The same for torch's float32 products on a CPU: MKL has special kernels for few rows on Intel."""
NARROW = 256
"""Models with a smaller hidden size use MKL: its products take less than the 13 µs of a call of
oneDNN (MKL: 3 µs).
"""
SIMD_WIDTH = 32
"""Numbers that an exponential processes at a time; the remainder is computed differently."""


class TorchLinear:
    """A linear layer on states [rows, in], and the operations that a decoder layer applies to it.

    Its bits for a row do not depend on the other rows, from `MIN_ROWS_OF_MKL` rows on.
    """

    def __init__(self, layer: Any) -> None:
        self.weight: Tensor = layer.weight.detach()
        self.bias: Tensor | None = None if layer.bias is None else layer.bias.detach()

    def __call__(self, states: Tensor) -> Tensor:
        return linear(states, self.weight, self.bias)

    def silu(self, states: Tensor) -> Tensor:
        """Return silu of the layer's result."""
        # In whole vectors, so that all numbers of a row are computed in the same way.
        width = len(self.weight)
        padded = states.new_zeros(len(states), -(-width // SIMD_WIDTH) * SIMD_WIDTH)
        padded[:, :width] = self(states)
        return silu(padded, inplace=True)[:, :width]

    def times(self, other: Tensor, states: Tensor) -> Tensor:
        """Return the layer's result times `other`, which may be overwritten."""
        return other.mul_(self(states))

    def added_to(self, other: Tensor, states: Tensor) -> Tensor:
        """Return the layer's result plus `other`, which may be overwritten."""
        other.addmm_(states, self.weight.t())
        return other if self.bias is None else other.add_(self.bias)


class OnednnLinear(TorchLinear):
    """A linear layer computed by oneDNN, each method in one pass over memory.

    Its bits for a row do not depend on the other rows, from `MIN_ROWS` rows on.
    """

    def __init__(self, layer: Any) -> None:
        from workers.cpu import onednn

        super().__init__(layer)
        self.onednn = onednn

    def __call__(self, states: Tensor) -> Tensor:
        return self.onednn.linear(states, self.weight, self.bias)

    def silu(self, states: Tensor) -> Tensor:
        """Return silu of the layer's result."""
        return self.onednn.linear_silu(states, self.weight, self.bias)

    def times(self, other: Tensor, states: Tensor) -> Tensor:
        """Return the layer's result times `other`."""
        return self.onednn.linear_binary("mul", other, states, self.weight, self.bias)

    def added_to(self, other: Tensor, states: Tensor) -> Tensor:
        """Return the layer's result plus `other`."""
        return self.onednn.linear_binary("add", other, states, self.weight, self.bias)


class Int8Linear(TorchLinear):
    """A linear layer with an int8 weight.

    `added_to` adds after the product: torch's `addmm_` would multiply by the dequantized weight.
    """

    def added_to(self, other: Tensor, states: Tensor) -> Tensor:
        """Return the layer's result plus `other`, which may be overwritten."""
        return other.add_(self(states))


def build_linear(layer: Any, by_onednn: bool) -> TorchLinear:
    """Return the matching class for this layer; `by_onednn` is the result of `goes_by_onednn`."""
    if isinstance(layer.weight, Int8Weight):
        return Int8Linear(layer)
    return OnednnLinear(layer) if by_onednn else TorchLinear(layer)


def goes_by_onednn(module: Any) -> bool:
    """Return True if the direct pass of this model uses oneDNN, because it is faster."""
    weight = module.lm_head.weight
    if weight.device.type != "cpu" or module.config.hidden_size < NARROW:
        return False  # workers.cpu is not even imported on a GPU
    from workers.cpu import onednn

    return onednn.supports(weight)


def least_rows(weight: Tensor, by_onednn: bool) -> int:
    """Return the fewest rows of a pass through layers with such weights."""
    by_mkl = weight.device.type == "cpu" and weight.dtype == torch.float32 and not by_onednn
    return MIN_ROWS_OF_MKL if by_mkl else MIN_ROWS
