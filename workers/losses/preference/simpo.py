"""SimPO: simple preference optimization, without a reference."""

from __future__ import annotations

from torch import Tensor

from workers.losses.preference.registry import PREFERENCE_LOSSES, gap, per_token, smoothed


@PREFERENCE_LOSSES.register("simpo")
def compute_simpo_loss(
    log_probs: Tensor,
    num_tokens: Tensor,
    margin: Tensor,
    beta: float,
    simpo_gamma: float,
    label_smoothing: float,
) -> Tensor:
    """The loss of DPO with `x = beta d - simpo_gamma - margin`.

    `d` is the log-prob per token, chosen minus rejected.

    Source: SimPO, arXiv 2405.14734, equation 6
    """
    logits = beta * gap(per_token(log_probs, num_tokens)) - simpo_gamma - margin
    return smoothed(logits, label_smoothing)
