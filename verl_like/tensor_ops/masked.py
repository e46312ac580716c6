"""Sum and mean of the values inside a mask.

A mask may have any dtype; non-zero means inside (`last_places` needs a mask of zeros and ones).
Values outside, NaN included, never affect a result, and an empty mask gives zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype by bytes per value."""


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """Return the values inside the mask, zero outside: `torch.where(mask, values, 0)`, bit for bit.

    On CPUs `where` branches per value, which takes four to twenty times as long as this product.
    """
    mask = mask.bool()
    if not values.requires_grad:
        return _bits_inside(values, mask)
    apply: Callable[[Tensor, Tensor], Tensor] = _ZeroOutside.apply
    return apply(*torch.broadcast_tensors(values, mask))


def _bits_inside(values: Tensor, mask: Tensor) -> Tensor:
    """Multiply the bits, as integers, by one or zero: NaN and infinities outside become zero."""
    return (values.view(INTEGERS[values.element_size()]) * mask).view(values.dtype)


class _ZeroOutside(torch.autograd.Function):
    """Set values outside a mask to zero, and their gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return _bits_inside(values, mask)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return zero_outside(gradient, mask), None


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Return the sum of the values inside the mask, over everything or along `axis`."""
    selected = zero_outside(values, mask)
    return selected.sum() if axis is None else selected.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Return the mean of the values inside the mask; zero if the mask is empty."""
    mask = mask.bool().expand_as(values)
    return masked_sum(values, mask, axis) / torch.count_nonzero(mask, dim=axis).clamp(min=1)


def last_places(mask: Tensor) -> Tensor:
    """Return the position of each row's last true entry, [rows]; 0 in a row without any.

    A mask may have holes, so this is not the row's count minus one.
    """
    return (mask * torch.arange(mask.shape[-1], device=mask.device)).amax(dim=-1)
