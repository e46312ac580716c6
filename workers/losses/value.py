"""The critic's loss: the clipped squared error.

Tensors are [rows, R], with R response tokens. The result is two scalars: the loss, and the fraction
of tokens whose value is clipped.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.losses.aggregate import Denominators, agg_policy_loss


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Tensor, Tensor]:
    """Half the squared error of the value or of its clipped form, whichever is larger.

    The clipped form is within `cliprange_value` of the old value.

    Watch: If `critic/vf_clipfrac` is above 0.5, the critic follows its returns too slowly: widen
    `cliprange_value`, or scale the rewards down.

    Source: PPO's reference code, as described in arXiv 2005.12729, section 3
    """
    mask = response_mask.bool()
    predicted, target, old = (zero_outside(column, mask) for column in (vpreds, returns, values))
    near = predicted.clamp(old - cliprange_value, old + cliprange_value)
    free_error, clipped_error = (predicted - target).square(), (near - target).square()
    losses = 0.5 * torch.maximum(free_error, clipped_error)

    is_clipped = {"is_clipped": clipped_error > free_error}
    loss, metrics = agg_policy_loss(losses, is_clipped, mask, loss_agg_mode, None, **denominators)
    return loss, metrics["is_clipped"]
