"""The gap between the rollout's and the trainer's log-probs of the same tokens.

It is measured at every step: by the driver on a batch that has old log-probs, by the actor on the
update's own forward pass where that is what finds them. Names are verl's. Everything is a sum or a
maximum, so that parts of a batch, on several ranks or in several micro-batches, add up to the
figures of the whole.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.losses.blocks import row_blocks

TOKEN_SUMS = (
    "tokens",
    "diff",
    "diff_square",
    "p",
    "q",
    "p_square",
    "q_square",
    "pq",
    "kl",
    "k3",
    "ratio_square",
)
"""Sums over tokens: p is a token's probability by the rollout, q by the trainer, diff |p - q|."""

SAMPLE_MEANS = (
    "training_ppl",
    "training_log_ppl",
    "rollout_ppl",
    "rollout_log_ppl",
    "log_ppl_diff",
    "log_ppl_abs_diff",
    "ppl_ratio",
)
"""Figures that are means over samples; ppl is a response's perplexity."""

SUMS = (*TOKEN_SUMS, "samples", *SAMPLE_MEANS, "sample_ratio_square")
MAXIMA = ("diff", "log_ppl_diff", "minus_log_ppl_diff")

LARGEST = 20.0
"""Log-ratios are clamped to this before `exp`."""


class MismatchGauge:
    """Collects the gap over any number of parts of a batch."""

    def __init__(self, response_width: int) -> None:
        """Positions are told apart by powers of two: token 0, 1, 2-3, 4-7, ..."""
        num_bins = (response_width - 1).bit_length() + 1
        self.bins = [(1 << b >> 1, 1 << b) for b in range(num_bins)]
        self.sums = torch.zeros(len(SUMS) + 2 * num_bins, dtype=torch.float64)
        self.maxima = torch.full((len(MAXIMA),), -torch.inf, dtype=torch.float64)

    def add(self, rollout_log_probs: Tensor, log_probs: Tensor, mask: Tensor) -> None:
        """Take in rows [rows, R] of the rollout's and the trainer's log-probs.

        `mask` says which tokens count.
        """
        columns = (rollout_log_probs.detach(), log_probs.detach(), mask.bool())
        for rows in row_blocks(mask):
            self._add_rows(*(column[rows].cpu() for column in columns))

    def _add_rows(self, rollout: Tensor, trained: Tensor, inside: Tensor) -> None:
        if not bool(inside.any()):
            return

        rollout = zero_outside(rollout, inside).double()
        trained = zero_outside(trained, inside).double()
        places = inside.flatten().nonzero().squeeze(-1)
        of_tokens = (column.flatten().index_select(0, places) for column in (rollout, trained))
        tokens, largest = _token_sums(*of_tokens)
        samples, extremes = _sample_sums(rollout.sum(dim=1), trained.sum(dim=1), inside.sum(dim=1))

        gaps = rollout.sub_(trained).abs_().sum(dim=0)
        counts = inside.sum(dim=0).double()
        of_bins = [column[start:end].sum() for column in (gaps, counts) for start, end in self.bins]
        self.sums += torch.stack([*tokens, *samples, *of_bins])
        self.maxima = torch.maximum(self.maxima, torch.stack([largest, *extremes]))

    def all_reduce(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Add up over ranks; collective."""
        if group is None:
            return
        sums, maxima = self.sums.to(device), self.maxima.to(device)
        dist.all_reduce(sums, group=group)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=group)
        self.sums, self.maxima = sums.cpu(), maxima.cpu()

    def metrics(self) -> dict[str, float]:
        """The figures; none of a batch without response tokens."""
        total = dict(zip(SUMS, self.sums.tolist(), strict=False))
        largest = dict(zip(MAXIMA, self.maxima.tolist(), strict=True))
        tokens, samples = total["tokens"], total["samples"]
        if not tokens:
            return {}

        variance = (total["diff_square"] - total["diff"] ** 2 / tokens) / max(tokens - 1, 1)
        found = {
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
        found |= {f"rollout_corr/{name}": total[name] / samples for name in SAMPLE_MEANS}
        return found | self._gap_by_position()

    def _gap_by_position(self) -> dict[str, float]:
        """The mean gap of each bin of positions that has tokens."""
        gaps, counts = self.sums[len(SUMS) :].view(2, len(self.bins)).tolist()
        found = {}
        for (start, _), gap, count in zip(self.bins, gaps, counts, strict=True):
            if count:
                found[f"rollout_corr/gap_from_token_{start}"] = gap / count
        return found


def _token_sums(rollout: Tensor, trained: Tensor) -> tuple[list[Tensor], Tensor]:
    """The values of `TOKEN_SUMS` over flat lists of tokens, and the largest "diff"."""
    log_ratio = (trained - rollout).clamp_(-LARGEST, LARGEST)
    p, q = rollout.exp(), trained.exp()
    diff = (p - q).abs_()
    ratio_less_1 = torch.expm1(log_ratio)
    kl, k3 = -log_ratio.sum(), (ratio_less_1 - log_ratio).sum()
    ratio = ratio_less_1.add_(1)

    squares = ((diff, diff), (p, p), (q, q), (p, q), (ratio, ratio))
    diff_square, p_square, q_square, pq, ratio_square = (torch.dot(*pair) for pair in squares)
    count = torch.tensor(float(len(p)), dtype=torch.float64)
    sums = [count, diff.sum(), diff_square, p.sum(), q.sum(), p_square, q_square, pq]
    return [*sums, kl, k3, ratio_square], diff.max()


def _sample_sums(
    rollout: Tensor, trained: Tensor, lengths: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """The values of "samples", `SAMPLE_MEANS` and "sample_ratio_square", and two of `MAXIMA`.

    Given are the sums of each row's log-probs; rows without tokens are left out.
    """
    filled = lengths > 0
    rollout, trained, lengths = rollout[filled], trained[filled], lengths[filled]
    of_rollout, of_trainer = -rollout / lengths, -trained / lengths
    diff = (of_trainer - of_rollout).clamp(-LARGEST, LARGEST)
    whole = (trained - rollout).clamp(-LARGEST, LARGEST)
    columns = (
        of_trainer.exp(),
        of_trainer,
        of_rollout.exp(),
        of_rollout,
        diff,
        diff.abs(),
        diff.exp(),
        (2 * whole).exp(),
    )
    count = torch.tensor(float(len(lengths)), dtype=torch.float64)
    return [count, *(column.sum() for column in columns)], [diff.max(), (-diff).max()]


def _pearson(total: dict[str, float], tokens: float) -> float:
    """Correlation of the two probabilities; 1 where neither varies."""
    covariance = total["pq"] - total["p"] * total["q"] / tokens
    spread_p = total["p_square"] - total["p"] ** 2 / tokens
    spread_q = total["q_square"] - total["q"] ** 2 / tokens
    if spread_p <= 0 or spread_q <= 0:
        return 1.0
    return covariance / math.sqrt(spread_p * spread_q)
