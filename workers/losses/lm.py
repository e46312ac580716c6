"""The language-model loss, used by SFT and by PTX next to a policy loss."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from workers.losses.aggregate import Denominators, agg_loss


def compute_lm_loss(
    log_probs: Tensor, mask: Tensor, **denominators: Unpack[Denominators]
) -> Tensor:
    """Return these rows' contribution to the mini-batch mean of -log_prob inside the mask.

    `log_probs` and `mask` are [rows, R]; the result is a scalar.

    Source: PTX is the extra term of PPO in InstructGPT, arXiv 2203.02155, equation 2
    """
    return agg_loss(-log_probs, mask, "token-mean", **denominators)
