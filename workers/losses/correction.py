"""Correct for samples from another policy: the function of `algorithm.rollout_correction`.

An update involves three policies. The *behavior* policy sampled the tokens (the rollout engine, or
older weights). The *proximal* policy is the reference of the clip in the policy loss (the trainer's
weights when the update begins, which give the old log-probs). The *current* policy is being
trained.

- Decoupled: before the update, `RolloutCorrection` compares the proximal policy with the behavior
  policy. The driver calls it on the whole batch (`trainer.ppo.updating`).
- Bypass: the proximal policy is the behavior policy. During the update, `RolloutCorrection`
  compares the current policy with the behavior policy (`workers.roles.actor`).

`RolloutCorrection` returns importance weights, and the mask without rejected tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_like.errors import ConfigError
from verl_like.tensor_ops import masked_mean, zero_outside
from workers.config import RolloutCorrectionConfig
from workers.losses.aggregate import MaskedRows, row_blocks
from workers.losses.correction_gauge import CorrectionGauge
from workers.losses.importance_ratio import LARGEST_LOG_RATIO
from workers.losses.rejection import SECTION, Bounds, Criterion, criteria_of, lengths, weight_bounds


@torch.no_grad()
def importance_weights(
    log_ratio: Tensor, mask: Tensor, level: str, bounds: Bounds
) -> tuple[Tensor, Tensor]:
    """Return (unbounded weights, bounded weights), each [rows, R] and zero outside the mask.

    `log_ratio` is zero outside the mask. The weight of a token is exp(log_ratio), or exp of the sum
    (sequence) or the mean (geometric) over its row. With only an upper bound, weights are truncated
    at it. With a lower bound as well, weights outside the bounds, and NaN, become zero.

    Source: truncation: Ionides, "Truncated importance sampling", JCGS 17, 2008; zeros outside:
    IcePop, arXiv 2510.18855
    """
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=-1, keepdim=True)
    elif level == "geometric":
        log_ratio = log_ratio.sum(dim=-1, keepdim=True) / lengths(mask)
    clamped = log_ratio.clamp(min=-LARGEST_LOG_RATIO, max=LARGEST_LOG_RATIO)
    raw = zero_outside(clamped.exp(), mask)

    if bounds.lower is None:
        return raw, raw.clamp(max=bounds.upper)
    within = (raw >= bounds.lower) & (raw <= bounds.upper)
    return raw, zero_outside(raw, within)


def normalized(weights: Tensor, mask: Tensor, level: str) -> tuple[Tensor, float]:
    """Return the weights [rows, R] divided by their mean, and the mean.

    The mean is over tokens (`level` "token"), or over rows that have tokens. Weights whose mean is
    (almost) zero are returned unchanged, with 1 instead of the mean.
    """
    if level == "token":
        mean = masked_mean(weights, mask).item()
    else:  # one weight per row
        mean = masked_mean(weights.amax(dim=-1), mask.any(dim=-1)).item()
    return (weights / mean, mean) if mean > 1e-8 else (weights, 1.0)


@dataclass(frozen=True)
class RolloutCorrection:
    """The settings in `algorithm.rollout_correction`, parsed and checked once."""

    level: str | None
    """Unit of the weights: "token", "sequence" or "geometric"; None means no weights."""
    bounds: Bounds
    """Weights outside these bounds are truncated or set to zero."""
    criteria: tuple[Criterion, ...]
    veto: float | None
    """The smallest allowed ratio of a token; a sequence with a smaller token ratio is rejected."""

    @classmethod
    def of(cls, settings: RolloutCorrectionConfig) -> RolloutCorrection:
        """Build the correction from its config section; raise on impossible settings."""
        bounds = weight_bounds(str(settings.rollout_is_threshold))
        veto = settings.rollout_token_veto_threshold
        least, meaning = 1.0, "the ratio of equal policies"
        if settings.rollout_is is not None and bounds.lower is not None:
            least, meaning = bounds.lower, "the lower rollout_is_threshold"
        if veto is not None and not 0 < veto < least:
            raise ConfigError(
                f"{SECTION}.rollout_token_veto_threshold={veto:g}: it must be above 0 and below "
                f"{least:g} ({meaning}), for example 1e-4."
            )
        thresholds = settings.rollout_rs_threshold
        criteria = criteria_of(settings.rollout_rs, None if thresholds is None else str(thresholds))
        return cls(settings.rollout_is, bounds, criteria, veto)

    def gauge(self) -> CorrectionGauge:
        """Return an empty gauge for the metrics of this correction."""
        criteria = {criterion.name: criterion.bounds for criterion in self.criteria}
        return CorrectionGauge(self.bounds if self.level else None, criteria)

    @torch.no_grad()
    def __call__(
        self, log_probs: Tensor, behavior_log_probs: Tensor, mask: Tensor, gauge: CorrectionGauge
    ) -> tuple[Tensor | None, Tensor]:
        """Return (weights or None, the mask without rejected tokens), each [rows, R].

        It compares the policy of `log_probs` with the policy that sampled the tokens. Rejected
        tokens also have weights. The metrics are added to `gauge`.
        """
        weights = None
        if self.level is not None:
            dtype = torch.result_type(log_probs, behavior_log_probs)
            weights = torch.empty_like(log_probs, dtype=dtype)
        accepted = torch.empty_like(mask)
        for rows in row_blocks(mask):
            part = MaskedRows(mask[rows].bool())
            log_ratio = zero_outside(log_probs[rows] - behavior_log_probs[rows], part.mask)
            if weights is not None:
                weights[rows] = self._weights(log_ratio, part, gauge)
            accepted[rows] = self._accepted(log_ratio, part, gauge)
        return weights, accepted

    def _weights(self, log_ratio: Tensor, part: MaskedRows, gauge: CorrectionGauge) -> Tensor:
        assert self.level is not None, "there are weights"
        raw, weights = importance_weights(log_ratio, part.mask, self.level, self.bounds)
        gauge.spreads["rollout_is"].add(part, weights, raw, by_token=self.level == "token")
        if self.bounds.lower is not None:
            num_zero = torch.count_nonzero(part.tokens(weights) == 0)
            gauge.add_fraction("rollout_is_oob_ratio", num_zero, part.num_tokens)
        return weights

    def _accepted(self, log_ratio: Tensor, part: MaskedRows, gauge: CorrectionGauge) -> Tensor:
        """Return a mask of the tokens that all criteria and the veto accept."""
        accepted = part.mask
        for criterion in self.criteria:
            name = f"rollout_rs_{criterion.name}"
            figures = criterion.figures(log_ratio, part.mask)
            keeps = criterion.keeps(figures)
            gauge.spreads[name].add(part, figures, figures, criterion.judges_tokens)
            gauge.add_rejected(name, part.mask & keeps, part)
            accepted = accepted & keeps

        if self.veto is not None:
            catastrophic = (part.mask & ~(log_ratio.exp() >= self.veto)).sum(dim=-1)
            vetoed = catastrophic > 0
            name = "rollout_is_catastrophic_token_fraction"
            gauge.add_fraction(name, catastrophic.sum(), part.num_tokens)
            gauge.add_fraction("rollout_is_veto_fraction", vetoed.sum(), part.num_rows)
            accepted = accepted & ~vetoed.unsqueeze(-1)

        if self.criteria or self.veto is not None:
            gauge.add_rejected("rollout_rs", accepted, part)
        return accepted
