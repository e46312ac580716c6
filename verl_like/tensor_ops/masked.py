"""Sum, mean, variance and whitening of the values inside a mask.

A mask may be of any dtype: non-zero is inside. What lies outside is never read into a result, NaN
included, and an empty mask gives zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By the bytes of a value."""


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """The values inside the mask, zero outside: `torch.where(mask, values, 0)`, bit for bit.

    On CPUs `where` takes a branch a value, which costs four to twenty times this product.
    """
    inside = mask.bool()
    if not values.requires_grad:
        return _bits_inside(values, inside)
    apply: Callable[[Tensor, Tensor], Tensor] = _ZeroOutside.apply
    return apply(*torch.broadcast_tensors(values, inside))


def _bits_inside(values: Tensor, inside: Tensor) -> Tensor:
    """Bits times one or zero, as integers: NaN and infinities outside become zero too."""
    return (values.view(INTEGERS[values.element_size()]) * inside).view(values.dtype)


class _ZeroOutside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, inside: Tensor) -> Tensor:
        ctx.save_for_backward(inside)
        return _bits_inside(values, inside)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (inside,) = ctx.saved_tensors
        return zero_outside(gradient, inside), None


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Sum of the values inside the mask, over all of it or along `axis`."""
    kept = zero_outside(values, mask)
    return kept.sum() if axis is None else kept.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Mean of the values inside the mask; zero where the mask is empty."""
    inside = mask.bool().expand_as(values)
    return masked_sum(values, inside, axis) / torch.count_nonzero(inside, dim=axis).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of the values inside the mask; zero for fewer than two of them."""
    inside = mask.bool().expand_as(values)
    centered = zero_outside(values - masked_mean(values, inside), inside)
    return centered.square().sum() / (torch.count_nonzero(inside) - int(unbiased)).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Values inside the mask scaled to variance 1 and mean 0; zero outside the mask.

    With `shift_mean=False` they keep their mean.
    """
    inside = mask.bool().expand_as(values)
    mean = masked_mean(values, inside)
    centered = zero_outside(values - mean, inside)
    num_others = (torch.count_nonzero(inside) - 1).clamp(min=1)
    var = torch.linalg.vector_norm(centered).square() / num_others
    whitened = centered * torch.rsqrt(var + 1e-8)
    return whitened if shift_mean else zero_outside(whitened + mean, inside)


def last_places(mask: Tensor) -> Tensor:
    """The place of each row's last true entry: [rows]; 0 in a row that has none.

    A mask may have holes, so that is not its count less one.
    """
    return (mask * torch.arange(mask.shape[-1], device=mask.device)).amax(dim=-1)
