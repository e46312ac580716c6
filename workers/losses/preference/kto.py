"""KTO: Kahneman-Tversky optimization, on single responses that are labeled good or bad."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.losses.preference.registry import PREFERENCE_LOSSES


@PREFERENCE_LOSSES.register("kto")
def compute_kto_loss(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    desirable: Tensor,
    mismatched_kl: Tensor,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """`w (1 - σ(s beta (r - z)))`, with `r` the log-ratio to the reference.

    A good response has `s = 1` and `w = desirable_weight`, a bad response `s = -1` and `w =
    undesirable_weight`. `z` estimates the KL to the reference, without gradient. It is the mean
    log-ratio, at least 0, over a batch whose responses are paired with the wrong prompts.

    Source: KTO, arXiv 2402.01306, section 4.1, equation 7
    """
    is_good = desirable != 0
    above = beta * (log_probs - ref_log_probs - mismatched_kl)
    weights = above.new_tensor([undesirable_weight, desirable_weight])
    return weights[is_good.long()] * torch.sigmoid(torch.where(is_good, -above, above))
