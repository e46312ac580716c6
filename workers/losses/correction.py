"""Correction for samples that another policy drew: `algorithm.rollout_correction` as a function.

Three policies have a part in an update: the *behaviour* policy drew the tokens (the rollout engine,
or older weights), the *proximal* one is what the clip of the policy loss compares with (the
trainer's, as the update begins: old log-probs), and the *current* one is being trained.

- Decoupled: `RolloutCorrection` compares proximal with behaviour before the update. The driver
  calls it on the whole batch (`trainer.ppo.update`).
- Bypass: the proximal policy is the behaviour policy, and `RolloutCorrection` compares current with
  behaviour, within the update (`workers.roles.actor`).

It gives importance weights, and the mask without the tokens that it rejects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl_like.errors import ConfigError
from verl_like.tensor_ops import masked_mean, zero_outside
from workers.losses.blocks import row_blocks
from workers.losses.correction_bounds import SECTION, Bounds, weight_bounds
from workers.losses.correction_gauge import CorrectionGauge, Part
from workers.losses.importance_ratio import LARGEST_LOG_RATIO
from workers.losses.rejection import Criterion, criteria_of, lengths

if TYPE_CHECKING:
    from workers.config import RolloutCorrectionConfig


@torch.no_grad()
def importance_weights(
    log_ratio: Tensor, inside: Tensor, level: str, bounds: Bounds
) -> tuple[Tensor, Tensor]:
    """(weights before the bounds, weights), each [rows, R], zero outside the mask.

    `log_ratio` is zero outside. A token's weight is exp(log_ratio), or exp of its row's sum
    (sequence) or mean (geometric). Without a lower bound weights are truncated at the upper one;
    with it those outside are zero, and so is NaN.

    Source: truncation: Ionides, "Truncated importance sampling", JCGS 17, 2008; zeros outside:
    IcePop, arXiv 2510.18855
    """
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=-1, keepdim=True)
    elif level == "geometric":
        log_ratio = log_ratio.sum(dim=-1, keepdim=True) / lengths(inside)
    clamped = log_ratio.clamp(min=-LARGEST_LOG_RATIO, max=LARGEST_LOG_RATIO)
    raw = zero_outside(clamped.exp(), inside)

    if bounds.lower is None:
        return raw, raw.clamp(max=bounds.upper)
    kept = (raw >= bounds.lower) & (raw <= bounds.upper)
    return raw, zero_outside(raw, kept)


def normalized(weights: Tensor, inside: Tensor, level: str) -> tuple[Tensor, float]:
    """The weights over their mean, and that mean: of all tokens, or of rows that have any.

    Weights that are all zero stay.
    """
    if level == "token":
        mean = masked_mean(weights, inside).item()
    else:  # one weight a row
        mean = masked_mean(weights.amax(dim=-1), inside.any(dim=-1)).item()
    return (weights / mean, mean) if mean > 1e-8 else (weights, 1.0)


@dataclass(frozen=True)
class RolloutCorrection:
    """`algorithm.rollout_correction`, read once and checked."""

    level: str | None
    """Which weights there are, if any: of a token, of a sequence, or geometric."""
    bounds: Bounds
    """Outside of these weights are truncated, or zero."""
    criteria: tuple[Criterion, ...]
    veto: float | None
    """The least ratio of a token; a sequence with a smaller one is rejected."""

    @classmethod
    def of(cls, settings: RolloutCorrectionConfig) -> RolloutCorrection:
        """The correction that the section describes; what it cannot be is an error."""
        bounds = weight_bounds(str(settings.rollout_is_threshold))
        veto, least, is_what = settings.rollout_token_veto_threshold, 1.0, "that of equal policies"
        if settings.rollout_is is not None and bounds.lower is not None:
            least, is_what = bounds.lower, "the lower rollout_is_threshold"
        if veto is not None and not 0 < veto < least:
            raise ConfigError(
                f"{SECTION}.rollout_token_veto_threshold={veto:g}: it is a ratio between 0 and "
                f"{least:g}, {is_what}; such as 1e-4."
            )
        thresholds = settings.rollout_rs_threshold
        criteria = criteria_of(settings.rollout_rs, None if thresholds is None else str(thresholds))
        return cls(settings.rollout_is, bounds, criteria, veto)

    @property
    def weighs(self) -> bool:
        """Whether there are importance weights."""
        return self.level is not None

    @property
    def rejects(self) -> bool:
        """Whether it may shorten the mask."""
        return bool(self.criteria) or self.veto is not None

    def gauge(self) -> CorrectionGauge:
        """An empty gauge for its figures."""
        criteria = {criterion.name: criterion.bounds for criterion in self.criteria}
        return CorrectionGauge(self.bounds if self.weighs else None, criteria)

    @torch.no_grad()
    def __call__(
        self, log_probs: Tensor, behaviour_log_probs: Tensor, mask: Tensor, gauge: CorrectionGauge
    ) -> tuple[Tensor | None, Tensor]:
        """(weights or None, the mask without rejected tokens) of rows [rows, R].

        The policy of `log_probs` is compared with the one that drew the tokens. Weights are those
        of all tokens, rejected or not. The figures go into `gauge`.
        """
        weights = None
        if self.level is not None:
            dtype = torch.result_type(log_probs, behaviour_log_probs)
            weights = torch.empty_like(log_probs, dtype=dtype)
        kept = torch.empty_like(mask)
        for rows in row_blocks(mask):
            part = Part(mask[rows].bool())
            log_ratio = zero_outside(log_probs[rows] - behaviour_log_probs[rows], part.inside)
            if weights is not None:
                weights[rows] = self._weights(log_ratio, part, gauge)
            kept[rows] = self._kept(log_ratio, part, gauge)
        return weights, kept

    def _weights(self, log_ratio: Tensor, part: Part, gauge: CorrectionGauge) -> Tensor:
        assert self.level is not None, "there are weights"
        raw, weights = importance_weights(log_ratio, part.inside, self.level, self.bounds)
        gauge.spreads["rollout_is"].add(part, weights, raw, by_token=self.level == "token")
        if self.bounds.lower is not None:
            num_zero = torch.count_nonzero(part.tokens(weights) == 0)
            gauge.add_fraction("rollout_is_oob_ratio", num_zero, part.num_tokens)
        return weights

    def _kept(self, log_ratio: Tensor, part: Part, gauge: CorrectionGauge) -> Tensor:
        """Where every criterion keeps a token, and the veto its row."""
        kept = part.inside
        for criterion in self.criteria:
            name = f"rollout_rs_{criterion.name}"
            figures = criterion.figures(log_ratio, part.inside)
            keeps = criterion.keeps(figures)
            gauge.spreads[name].add(part, figures, figures, criterion.judges_tokens)
            gauge.add_rejected(name, part.inside & keeps, part)
            kept = kept & keeps

        if self.veto is not None:
            catastrophic = (part.inside & ~(log_ratio.exp() >= self.veto)).sum(dim=-1)
            vetoed = catastrophic > 0
            name = "rollout_is_catastrophic_token_fraction"
            gauge.add_fraction(name, catastrophic.sum(), part.num_tokens)
            gauge.add_fraction("rollout_is_veto_fraction", vetoed.sum(), part.num_rows)
            kept = kept & ~vetoed.unsqueeze(-1)

        if self.rejects:
            gauge.add_rejected("rollout_rs", kept, part)
        return kept
