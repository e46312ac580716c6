"""Discounted sums over the tokens of a row, and whitening.

Tensors are [rows, R].
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.tensor_ops import zero_outside

BLOCK = 64
"""Number of tokens that one matrix product sums."""


def order_inside_first(response_mask: Tensor) -> Tensor | None:
    """Return the column order that moves each row's tokens inside the mask to the left.

    Return None if they are there already.
    """
    outside = response_mask == 0
    if not bool((outside[:, :-1] > outside[:, 1:]).any()):
        return None
    return outside.to(torch.uint8).argsort(dim=-1, stable=True)


def put_in_order(column: Tensor, order: Tensor | None) -> Tensor:
    """Return the column in the order of `order_inside_first`."""
    return column if order is None else column.gather(-1, order)


def put_back(column: Tensor, order: Tensor | None) -> Tensor:
    """Undo `put_in_order`."""
    return column if order is None else torch.empty_like(column).scatter_(-1, order, column)


def is_last_inside(response_mask: Tensor) -> Tensor:
    """Return a mask of each row's last token inside the mask; empty rows have none."""
    inside = response_mask.bool()
    num_from_here = inside.flip(-1).cumsum(-1).flip(-1)
    return inside & (num_from_here == 1)


def discounted_sum(terms: Tensor, decay: float) -> Tensor:
    """Return out[t], the sum over s >= t of decay^(s - t) * terms[s].

    A matrix product sums within each block; the blocks are then combined from the last to the
    first.
    """
    num_rows, width = terms.shape
    num_blocks = -(-width // BLOCK)
    missing = num_blocks * BLOCK - width
    padded = torch.nn.functional.pad(terms, (0, missing)) if missing else terms

    steps = torch.arange(BLOCK, device=terms.device)
    distance = steps[:, None] - steps[None, :]  # row: summed token; column: first token of the sum
    powers = float(decay) ** distance.clamp(min=0).to(terms.dtype)
    sums = padded.view(num_rows, num_blocks, BLOCK) @ torch.where(distance >= 0, powers, 0)

    to_next_block = float(decay) ** (BLOCK - steps).to(terms.dtype)
    for block in range(num_blocks - 2, -1, -1):
        sums[:, block].addcmul_(sums[:, block + 1, :1], to_next_block)
    return sums.flatten(start_dim=1)[:, :width]


def discounted_returns(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """Return each token's discounted return: the sum of its own and the row's later rewards."""
    order = order_inside_first(response_mask)
    rewards = zero_outside(token_level_rewards, response_mask)
    rewards = put_in_order(rewards, order)
    return put_back(discounted_sum(rewards, gamma), order)


def whiten_(values: Tensor, response_mask: Tensor) -> Tensor:
    """Scale values [rows, R] in place to mean 0 and variance 1, and return them.

    They must be zero outside the mask, and stay so. This needs a third of the memory traffic of an
    out-of-place version.
    """
    inside = (response_mask != 0).to(values.dtype)
    num_inside = torch.count_nonzero(inside)
    values.sub_(values.sum() / num_inside.clamp(min=1)).mul_(inside)
    variance = torch.linalg.vector_norm(values).square() / (num_inside - 1).clamp(min=1)
    return values.mul_(torch.rsqrt(variance + 1e-8))
