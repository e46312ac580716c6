"""Sum, mean, variance and whitening of the values inside a mask.

A mask may be of any dtype: non-zero is inside. What lies outside is never read into a result, NaN
included, and an empty mask gives zero.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Sum of the values inside the mask, over all of it or along `axis`."""
    kept = torch.where(mask.bool(), values, 0)
    return kept.sum() if axis is None else kept.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Mean of the values inside the mask; zero where the mask is empty."""
    inside = mask.bool().expand_as(values)
    return masked_sum(values, inside, axis) / torch.count_nonzero(inside, dim=axis).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of the values inside the mask; zero for fewer than two of them."""
    inside = mask.bool().expand_as(values)
    centered = torch.where(inside, values - masked_mean(values, inside), 0)
    return centered.square().sum() / (torch.count_nonzero(inside) - int(unbiased)).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Values inside the mask scaled to variance 1 and mean 0; zero outside the mask.

    With `shift_mean=False` they keep their mean.
    """
    inside = mask.bool().expand_as(values)
    mean = masked_mean(values, inside)
    centered = torch.where(inside, values - mean, 0)
    num_others = (torch.count_nonzero(inside) - 1).clamp(min=1)
    var = torch.linalg.vector_norm(centered).square() / num_others
    whitened = centered * torch.rsqrt(var + 1e-8)
    return whitened if shift_mean else torch.where(inside, whitened + mean, 0)


def last_places(mask: Tensor) -> Tensor:
    """The place of each row's last true entry: [rows]; 0 in a row that has none.

    A mask may have holes, so that is not its count less one.
    """
    return (mask * torch.arange(mask.shape[-1], device=mask.device)).amax(dim=-1)
