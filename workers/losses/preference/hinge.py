"""The hinge loss of SLiC, on log-ratios to a reference."""

from __future__ import annotations

from torch import Tensor

from workers.losses.preference.registry import PREFERENCE_LOSSES, gap


@PREFERENCE_LOSSES.register("hinge")
def compute_hinge_loss(
    log_probs: Tensor, ref_log_probs: Tensor, margin: Tensor, beta: float
) -> Tensor:
    """`max(0, 1 - (beta h - margin))`, with `h` as in DPO.

    Source: RSO, arXiv 2309.06657, hinge-norm; SLiC, arXiv 2305.10425, has the hinge
    """
    return (1 - (beta * gap(log_probs - ref_log_probs) - margin)).clamp(min=0)
