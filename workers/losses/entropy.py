"""The entropy bonus from whole logits; the training engine has entropies without them."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from verl_like.tensor_ops import entropy_from_logits
from workers.losses.aggregate import Denominators, agg_loss


def compute_entropy_loss(
    logits: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    **denominators: Unpack[Denominators],
) -> Tensor:
    """Aggregated entropy of [rows, tokens, vocabulary] logits; a bonus, so it is subtracted."""
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode, **denominators)
