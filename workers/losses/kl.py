"""The distance of two policies, from log-probs of tokens that one of them sampled.

Estimates of KL(policy || reference) are in the actor's loss and in the reward. They are
elementwise: a log-ratio of any shape, such as [rows, R], gives an estimate of that shape.
x = log policy - log reference.

`MismatchGauge` measures the gap between the rollout's and the trainer's log-probs. The driver
measures it if the batch has old log-probs. Otherwise the actor measures it in the forward passes of
the update. The names are verl's, except for `gap_from_token_…`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from verl_like.errors import ConfigError, nearest
from verl_like.tensor_ops import zero_outside
from workers.losses.aggregate import Gauge, MaskedRows, row_blocks
from workers.losses.registry import LARGEST_LOG_RATIO


def k1(log_ratio: Tensor) -> Tensor:
    """The log-ratio x.

    Source: Schulman, joschu.net/blog/kl-approx.html, 2020
    """
    return log_ratio


def absolute(log_ratio: Tensor) -> Tensor:
    """The absolute value of the log-ratio, |x|.

    Source: verl's `abs`
    """
    return log_ratio.abs()


def k2(log_ratio: Tensor) -> Tensor:
    """Half the square of the log-ratio; its gradient estimates the KL's gradient without bias.

    Source: Schulman 2020
    """
    return 0.5 * log_ratio.square()


def k3(log_ratio: Tensor) -> Tensor:
    """exp(-x) - 1 + x, which is never negative and has a low variance; clamped to 10.

    Source: Schulman 2020; as a loss: GRPO, arXiv 2402.03300
    """
    inverse = (-log_ratio).clamp(min=-20.0, max=20.0)
    return (inverse.exp() - inverse - 1).clamp(min=-10.0, max=10.0)


def k3_unclamped(log_ratio: Tensor) -> Tensor:
    """exp(-x) - 1 + x, without a bound: a token whose reference is far away dominates the mean.

    Source: TRL's GRPO
    """
    return (-log_ratio).exp() - 1 + log_ratio


def k3_swapped(log_ratio: Tensor) -> Tensor:
    """exp(x) - 1 - x: k3 with policy and reference swapped; clamped to 10.

    Its mean over samples of the policy is the chi-squared divergence minus the KL, not the KL. Use
    it only to match ColossalChat.

    Source: ColossalChat's `compute_approx_kl`, which does not clamp
    """
    return k3(-log_ratio)


KL_ESTIMATORS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "kl": k1,
    "k1": k1,
    "abs": absolute,
    "mse": k2,
    "k2": k2,
    "low_var_kl": k3,
    "k3": k3,
    "k3_unclamped": k3_unclamped,
    "k3_swapped": k3_swapped,
}


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Return the estimate `kl_penalty`, a key of `KL_ESTIMATORS`, for every token: [rows, R].

    With a trailing +, such as "k3+", its gradient is that of k2 (straight-through).
    """
    name = kl_penalty.removesuffix("+")
    if name not in KL_ESTIMATORS:
        raise ConfigError(
            f"unknown KL estimator {kl_penalty!r}. Known: {', '.join(KL_ESTIMATORS)}, also with a "
            f"trailing +.{nearest(name, KL_ESTIMATORS)}"
        )
    log_ratio = logprob - ref_logprob
    estimate = KL_ESTIMATORS[name](log_ratio)
    if name == kl_penalty:
        return estimate

    gradient = k2(log_ratio)
    return gradient - gradient.detach() + estimate.detach()


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
