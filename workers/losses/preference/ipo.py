"""IPO: identity preference optimization."""

from __future__ import annotations

from torch import Tensor

from workers.losses.preference.registry import PREFERENCE_LOSSES, gap, per_token


@PREFERENCE_LOSSES.register("ipo")
def compute_ipo_loss(
    log_probs: Tensor, ref_log_probs: Tensor, num_tokens: Tensor, beta: float
) -> Tensor:
    """`(h - 1 / (2 beta))^2`. `h` is the log-ratio per token, chosen minus rejected.

    `beta` is the paper's tau. As in TRL, the log-ratio is a mean over the response's tokens.

    Source: IPO, arXiv 2310.12036, equation 17
    """
    h = gap(per_token(log_probs - ref_log_probs, num_tokens))
    return (h - 1 / (2 * beta)).square()
