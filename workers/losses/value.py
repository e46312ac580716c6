"""The critic's loss: the clipped squared error.

Tensors are [rows, R], with R response tokens. The result is two scalars: the loss, and the fraction
of tokens whose value is clipped.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.losses.aggregate import Denominators, LossAndMetrics, agg_policy_loss, with_slope
from workers.losses.blocks import sum_over_blocks


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

    def share(vpreds: Tensor, rows: slice, counts: Denominators) -> LossAndMetrics:
        mask = response_mask[rows].bool()
        predicted = zero_outside(vpreds.detach(), mask)
        target, old = (zero_outside(column[rows], mask) for column in (returns, values))
        near = torch.maximum(predicted, old - cliprange_value)
        near = torch.minimum(near, old + cliprange_value)
        error = predicted - target
        free_error, clipped_error = error.square(), (near - target).square()

        is_clipped = clipped_error > free_error
        worse = torch.maximum(free_error, clipped_error)
        losses = 0.5 * with_slope(worse, zero_outside(2.0 * error, ~is_clipped), vpreds)
        marked = {"is_clipped": is_clipped}
        return agg_policy_loss(losses, marked, mask, loss_agg_mode, None, **counts)

    loss, metrics = sum_over_blocks(share, vpreds, response_mask, denominators)
    return loss, metrics["is_clipped"]
