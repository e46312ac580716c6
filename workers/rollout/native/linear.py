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
NARROW = 256
"""Hidden size below which a model's layers are computed by MKL: they take less than the 13 µs that
a call takes oneDNN (MKL 3).
"""
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
        """silu of the layer's result."""
        return self.onednn.linear_silu(states, self.weight, self.bias)

    def times(self, other: Tensor, states: Tensor) -> Tensor:
        """The layer's result times `other`."""
        return self.onednn.linear_binary("mul", other, states, self.weight, self.bias)

    def added_to(self, other: Tensor, states: Tensor) -> Tensor:
        """The layer's result plus `other`."""
        return self.onednn.linear_binary("add", other, states, self.weight, self.bias)


class Int8Linear(TorchLinear):
    """A linear layer with an int8 weight.

    `added_to` adds after the product: torch's `addmm_` would multiply by the weight's floats.
    """

    def added_to(self, other: Tensor, states: Tensor) -> Tensor:
        """The layer's result plus `other`, which may be written over."""
        return other.add_(self(states))


def build_linear(layer: Any, by_onednn: bool) -> TorchLinear:
    """One of the three for this layer; `by_onednn` says `goes_by_onednn` of the model."""
    if isinstance(layer.weight, Int8Weight):
        return Int8Linear(layer)
    return OnednnLinear(layer) if by_onednn else TorchLinear(layer)


def goes_by_onednn(module: Any) -> bool:
    """Whether the direct pass of this model multiplies by oneDNN: the faster one for it."""
    weight = module.lm_head.weight
    if weight.device.type != "cpu" or module.config.hidden_size < NARROW:
        return False  # workers.cpu is not even imported on a GPU
    from workers.cpu import onednn

    return onednn.supports(weight)


def least_rows(weight: Tensor, by_onednn: bool) -> int:
    """Fewest rows of a pass through layers of such weights."""
    by_mkl = weight.device.type == "cpu" and weight.dtype == torch.float32 and not by_onednn
    return MIN_ROWS_OF_MKL if by_mkl else MIN_ROWS
