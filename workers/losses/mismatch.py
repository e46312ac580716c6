"""Measure the gap between the rollout's and the trainer's log-probs of the same tokens.

The driver measures the gap if the batch has old log-probs. Otherwise the actor measures it in the
forward passes of the update. The names are verl's, except for `gap_from_token_…`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.losses.aggregate import Gauge, MaskedRows, row_blocks
from workers.losses.registry import LARGEST_LOG_RATIO

SAMPLE_MEANS = (
    "training_ppl",
    "training_log_ppl",
    "rollout_ppl",
    "rollout_log_ppl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "ppl_ratio",
)
"""Metrics that are means over samples. `ppl` is the perplexity of a response."""


class MismatchGauge(Gauge):
    """Accumulates the gap over any number of rows."""

    def __init__(self, response_width: int) -> None:
        """Create bins of token positions at powers of two: 0, 1, 2-3, 4-7, ..."""
        super().__init__()
        num_bins = (response_width - 1).bit_length() + 1
        self.bins = [(1 << b >> 1, 1 << b) for b in range(num_bins)]

    def add(self, rollout_log_probs: Tensor, log_probs: Tensor, mask: Tensor) -> None:
        """Add rows [rows, R] of the rollout's and the trainer's log-probs.

        Only tokens inside `mask` count.
        """
        columns = (rollout_log_probs.detach(), log_probs.detach(), mask.bool())
        for rows in row_blocks(mask):
            self._add_rows(*(column[rows].cpu() for column in columns))

    def _add_rows(self, rollout: Tensor, trained: Tensor, mask: Tensor) -> None:
        """Add the log-probs of rows of responses, by token, by sample and by position."""
        part = MaskedRows(mask)
        if not part.num_tokens:
            return

        rollout = zero_outside(rollout, mask).double()
        trained = zero_outside(trained, mask).double()
        self._add_tokens(part.tokens(rollout), part.tokens(trained))
        self._add_samples(rollout.sum(dim=1), trained.sum(dim=1), part.lengths)

        gaps = rollout.sub_(trained).abs_().sum(dim=0)
        counts = mask.sum(dim=0).double()
        for start, end in self.bins:
            self.note(
                {f"gap {start}": gaps[start:end].sum(), f"in {start}": counts[start:end].sum()}
            )

    def _add_tokens(self, rollout: Tensor, trained: Tensor) -> None:
        """Add tokens (1-D). p is a token's probability in the rollout engine, q in the trainer."""
        log_ratio = (trained - rollout).clamp_(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        p, q = rollout.exp(), trained.exp()
        diff = (p - q).abs_()
        ratio_less_1 = torch.expm1(log_ratio)
        kl, k3 = -log_ratio.sum(), (ratio_less_1 - log_ratio).sum()
        ratio = ratio_less_1.add_(1)
        self.note(
            {
                "tokens": len(p),
                "diff": diff.sum(),
                "diff_square": torch.dot(diff, diff),
                "p": p.sum(),
                "q": q.sum(),
                "p_square": torch.dot(p, p),
                "q_square": torch.dot(q, q),
                "pq": torch.dot(p, q),
                "kl": kl,
                "k3": k3,
                "ratio_square": torch.dot(ratio, ratio),
            },
            {"diff": diff.max()},
        )

    def _add_samples(self, rollout: Tensor, trained: Tensor, lengths: Tensor) -> None:
        """Add the sums of each row's log-probs; rows without tokens are skipped."""
        filled = lengths > 0
        rollout, trained, lengths = rollout[filled], trained[filled], lengths[filled]
        of_rollout, of_trainer = -rollout / lengths, -trained / lengths
        diff = (of_trainer - of_rollout).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        log_ratio = (trained - rollout).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        columns = (
            *(of_trainer.exp(), of_trainer, of_rollout.exp(), of_rollout),
            *(diff, diff.abs(), diff.exp()),
        )
        sums = {name: column.sum() for name, column in zip(SAMPLE_MEANS, columns, strict=True)}
        self.note(
            {**sums, "samples": len(lengths), "sample_ratio_square": (2 * log_ratio).exp().sum()},
            {"log_ppl_diff": diff.max(), "minus_log_ppl_diff": (-diff).max()},
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics; empty for a batch without response tokens."""
        total, largest = self.sums, self.maxima
        if not total:
            return {}

        tokens, samples = total["tokens"], total["samples"]
        variance = (total["diff_square"] - total["diff"] ** 2 / tokens) / max(tokens - 1, 1)
        metrics = {
            "training/rollout_probs_diff_max": largest["diff"],
            "training/rollout_probs_diff_mean": total["diff"] / tokens,
            "training/rollout_probs_diff_std": math.sqrt(max(variance, 0.0)),
            "training/rollout_actor_probs_pearson_corr": _pearson(total, tokens),
            "rollout_corr/kl": total["kl"] / tokens,
            "rollout_corr/k3_kl": total["k3"] / tokens,
            "rollout_corr/chi2_token": total["ratio_square"] / tokens - 1,
            "rollout_corr/chi2_seq": total["sample_ratio_square"] / samples - 1,
            "rollout_corr/log_ppl_diff_max": largest["log_ppl_diff"],
            "rollout_corr/log_ppl_diff_min": -largest["minus_log_ppl_diff"],
        }
        metrics |= {f"rollout_corr/{name}": total[name] / samples for name in SAMPLE_MEANS}
        for start, _ in self.bins:
            count = total[f"in {start}"]
            if count:
                metrics[f"rollout_corr/gap_from_token_{start}"] = total[f"gap {start}"] / count
        return metrics


def _pearson(total: dict[str, float], tokens: float) -> float:
    """Return the correlation of the two probabilities; 1 if one of them does not vary."""
    covariance = total["pq"] - total["p"] * total["q"] / tokens
    spread_p = total["p_square"] - total["p"] ** 2 / tokens
    spread_q = total["q_square"] - total["q"] ** 2 / tokens
    if spread_p <= 0 or spread_q <= 0:
        return 1.0
    return covariance / math.sqrt(spread_p * spread_q)
