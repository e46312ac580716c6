"""DPO: direct preference optimization, also cDPO (for noisy labels) and ODPO (with margins)."""

from __future__ import annotations

from torch import Tensor

from workers.losses.preference.registry import PREFERENCE_LOSSES, gap, smoothed


@PREFERENCE_LOSSES.register("dpo")
def compute_dpo_loss(
    log_probs: Tensor, ref_log_probs: Tensor, margin: Tensor, beta: float, label_smoothing: float
) -> Tensor:
    """`-(1 - e) log σ(x) - e log σ(-x)` with `x = beta h - margin`.

    `h` is the log-ratio to the reference, chosen minus rejected. `e`, the `label_smoothing`, is the
    assumed fraction of swapped pairs. If `e` is above 0, the loss is cDPO (Mitchell, 2023). With
    margins, the loss is ODPO (arXiv 2402.10571).

    Source: DPO, arXiv 2305.18290, equation 7
    """
    return smoothed(beta * gap(log_probs - ref_log_probs) - margin, label_smoothing)
