"""The critic's losses: the clipped squared error and the Huber loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor
from torch.nn.functional import huber_loss

from verl_like.tensor_ops import zero_outside
from workers.losses.aggregate import Denominators, agg_policy_loss, with_slope
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
    """Half the squared error of the value or of its clipped form, whichever is worse.

    The clipped form is within `cliprange_value` of the old value.

    Watch: `critic/vf_clipfrac`. If most tokens are clipped, the critic follows its returns too
    slowly: widen `cliprange_value`, or scale the rewards down.

    Source: PPO's reference code, as described in arXiv 2005.12729, section 3
    """

    def losses_of(vpreds: Tensor, rows: slice, inside: Tensor) -> tuple[Tensor, Tensor]:
        predicted = zero_outside(vpreds.detach(), inside)
        target, old = (zero_outside(column[rows], inside) for column in (returns, values))
        near = torch.maximum(predicted, old - cliprange_value)
        near = torch.minimum(near, old + cliprange_value)
        error = predicted - target
        free_error, clipped_error = error.square(), (near - target).square()

        is_clipped = clipped_error > free_error
        worse = torch.maximum(free_error, clipped_error)
        return 0.5 * with_slope(worse, zero_outside(2.0 * error, ~is_clipped), vpreds), is_clipped

    return _value_loss(losses_of, vpreds, response_mask, loss_agg_mode, denominators)


def compute_huber_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    huber_delta: float,
    loss_agg_mode: str = "token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Tensor, Tensor]:
    """Half the squared error of the value up to `huber_delta`, linear beyond it.

    Watch: `critic/vf_clipfrac`, here the share of errors above `huber_delta`. Near 1 only the signs
    of the errors reach the gradient: raise `huber_delta` to the size of the returns.

    Source: Huber, Annals of Mathematical Statistics 35, 1964
    """

    def losses_of(vpreds: Tensor, rows: slice, inside: Tensor) -> tuple[Tensor, Tensor]:
        error = zero_outside(vpreds - returns[rows], inside)
        losses = huber_loss(error, torch.zeros_like(error), reduction="none", delta=huber_delta)
        return losses, error.detach().abs() > huber_delta

    return _value_loss(losses_of, vpreds, response_mask, loss_agg_mode, denominators)


def _value_loss(
    losses_of: Callable[[Tensor, slice, Tensor], tuple[Tensor, Tensor]],
    vpreds: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    denominators: Denominators,
) -> tuple[Tensor, Tensor]:
    """Return the loss, and the fraction of the tokens that `losses_of` marks."""

    def share(
        vpreds: Tensor, rows: slice, counts: Denominators
    ) -> tuple[Tensor, dict[str, Tensor]]:
        inside = response_mask[rows].bool()
        losses, marked = losses_of(vpreds, rows, inside)
        return agg_policy_loss(losses, {"marked": marked}, inside, loss_agg_mode, None, **counts)

    loss, metrics = sum_over_blocks(share, vpreds, response_mask, denominators)
    return loss, metrics["marked"]
