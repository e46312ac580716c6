"""KTO: Kahneman-Tversky optimization, on single responses that are labelled good or bad."""

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
    """w (1 - sigmoid(s beta (r - z))), with r the log-ratio to the reference.

    s and w are 1 and `desirable_weight` for a good response, -1 and `undesirable_weight` for a bad
    one. z estimates the KL to the reference, without gradient: the mean log-ratio of the mismatched
    responses of a batch, at least zero.

    Source: KTO, arXiv 2402.01306, section 4.1, equation 7
    """
    is_good = desirable != 0
    above = beta * (log_probs - ref_log_probs - mismatched_kl)
    weights = above.new_tensor([undesirable_weight, desirable_weight])
    return weights[is_good.long()] * torch.sigmoid(torch.where(is_good, -above, above))
