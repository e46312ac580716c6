"""The critic's loss."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from workers.losses.aggregate import Denominators, agg_loss


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Tensor, Tensor]:
    """Half the squared error of the value, or of its clipped form if that is worse.

    The clip keeps a value within `cliprange_value` of the old one. Returns the loss and the share
    of tokens whose clipped error counted.

    Source: PPO's reference code, as described in arXiv 2005.12729, section 3
    """
    inside = response_mask.bool()
    vpreds = torch.where(inside, vpreds, 0)
    returns = torch.where(inside, returns, 0)
    values = torch.where(inside, values, 0)

    near = torch.maximum(vpreds, values - cliprange_value)
    near = torch.minimum(near, values + cliprange_value)
    free_error, clipped_error = (vpreds - returns).square(), (near - returns).square()

    worse = torch.maximum(free_error, clipped_error)
    loss = 0.5 * agg_loss(worse, inside, loss_agg_mode, **denominators)
    held = (clipped_error > free_error).to(loss.dtype)
    return loss, agg_loss(held, inside, "token-mean", **denominators)
