"""ORPO: odds ratio preference optimization, without a reference."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from workers.losses.preference.registry import PREFERENCE_LOSSES, gap, per_token

_NEAREST_TO_CERTAIN = -1e-12
"""Log-probs per token are clamped to this, because the odds of a log-prob of 0 are infinite."""


@PREFERENCE_LOSSES.register("orpo")
def compute_orpo_loss(log_probs: Tensor, num_tokens: Tensor, orpo_lambda: float) -> Tensor:
    """`-m_chosen - orpo_lambda log σ(log odds_chosen - log odds_rejected)`.

    `m` is the log-prob per token, and `odds = e^m / (1 - e^m)`. The first term is the SFT loss.

    Source: ORPO, arXiv 2403.07691, equations 6 and 7
    """
    means = per_token(log_probs, num_tokens)
    certain = means.clamp(max=_NEAREST_TO_CERTAIN)
    log_odds = certain - torch.log(-torch.expm1(certain))
    return -means[:, 0] - orpo_lambda * logsigmoid(gap(log_odds))
