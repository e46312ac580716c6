"""DPO: direct preference optimization."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from workers.losses.preference.registry import PREFERENCE_LOSSES, gap


@PREFERENCE_LOSSES.register("dpo")
def compute_dpo_loss(log_probs: Tensor, ref_log_probs: Tensor, beta: float) -> Tensor:
    """-log sigmoid(beta h), with h the log-ratio to the reference, chosen less rejected.

    Source: DPO, arXiv 2305.18290, equation 7
    """
    return -logsigmoid(beta * gap(log_probs - ref_log_probs))
