"""SimPO: simple preference optimization, without a reference."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from workers.losses.preference.registry import PREFERENCE_LOSSES, gap, per_token


@PREFERENCE_LOSSES.register("simpo")
def compute_simpo_loss(
    log_probs: Tensor, num_tokens: Tensor, beta: float, simpo_gamma: float
) -> Tensor:
    """-log sigmoid(beta d - gamma), with d the log-prob a token, chosen less rejected.

    Source: SimPO, arXiv 2405.14734, equation 6
    """
    return -logsigmoid(beta * gap(per_token(log_probs, num_tokens)) - simpo_gamma)
