"""The language-model loss: that of SFT, and of PTX beside a policy loss."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from workers.losses.aggregate import Denominators, agg_loss


def compute_lm_loss(
    log_probs: Tensor, mask: Tensor, **denominators: Unpack[Denominators]
) -> Tensor:
    """The mean of -log_prob over the tokens inside the mask: this part's share of it.

    Source: PTX is the term beside PPO's in InstructGPT, arXiv 2203.02155, equation 2
    """
    return agg_loss(-log_probs, mask, "token-mean", **denominators)
