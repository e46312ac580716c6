"""The critic's losses: the clipped square, and Huber's."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.losses.aggregate import Denominators, agg_loss, share_of_tokens, with_slope
from workers.losses.blocks import in_blocks


@in_blocks("vpreds")
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

    Watch: `critic/vf_clipfrac`; where most tokens are held by the clip the critic follows its
    returns too slowly: widen `cliprange_value`, or scale the rewards down.

    Source: PPO's reference code, as described in arXiv 2005.12729, section 3
    """
    inside = response_mask.bool()
    predicted = zero_outside(vpreds.detach(), inside)
    returns = zero_outside(returns, inside)
    values = zero_outside(values, inside)

    near = torch.maximum(predicted, values - cliprange_value)
    near = torch.minimum(near, values + cliprange_value)
    error = predicted - returns
    free_error, clipped_error = error.square(), (near - returns).square()

    held = clipped_error > free_error
    worse = torch.maximum(free_error, clipped_error)
    losses = with_slope(worse, zero_outside(2.0 * error, ~held), vpreds)
    loss = 0.5 * agg_loss(losses, inside, loss_agg_mode, **denominators)
    return loss, share_of_tokens(held, inside, **denominators).to(loss.dtype)


@in_blocks("vpreds")
def compute_huber_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    huber_delta: float,
    loss_agg_mode: str = "token-mean",
    **denominators: Unpack[Denominators],
) -> tuple[Tensor, Tensor]:
    """Half the squared error of the value up to `huber_delta`, from there on linear.

    So a few returns that are far off do not rule the gradient. Returns the loss and the share of
    tokens in the linear part.

    Watch: `critic/vf_clipfrac`, here the share of errors above `huber_delta`; near 1 the gradient
    has only signs: raise `huber_delta` to the size of the returns.

    Source: Huber, Annals of Mathematical Statistics 35, 1964
    """
    inside = response_mask.bool()
    error = zero_outside(vpreds - returns, inside)
    losses = torch.nn.functional.huber_loss(
        error, torch.zeros_like(error), reduction="none", delta=huber_delta
    )
    loss = agg_loss(losses, inside, loss_agg_mode, **denominators)
    linear = error.detach().abs() > huber_delta
    return loss, share_of_tokens(linear, inside, **denominators).to(loss.dtype)
