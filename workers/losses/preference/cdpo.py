"""cDPO: DPO on labels of which some are wrong."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from workers.losses.preference.registry import PREFERENCE_LOSSES, gap


@PREFERENCE_LOSSES.register("cdpo")
def compute_cdpo_loss(
    log_probs: Tensor, ref_log_probs: Tensor, beta: float, label_smoothing: float
) -> Tensor:
    """-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), with DPO's h.

    e, `label_smoothing`, is the share of pairs that are the wrong way round.

    Source: Mitchell, A note on DPO with noisy preferences and relationship to IPO, 2023
    """
    logits = beta * gap(log_probs - ref_log_probs)
    right, wrong = -logsigmoid(logits), -logsigmoid(-logits)
    return (1 - label_smoothing) * right + label_smoothing * wrong
