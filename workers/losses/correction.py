"""Correct for samples from another policy: the function of `algorithm.rollout_correction`.

An update involves three policies. The *behavior* policy sampled the tokens (the rollout engine, or
older weights). The *proximal* policy is the reference of the clip in the policy loss (the trainer's
weights when the update begins, which give the old log-probs). The *current* policy is being
trained.

- Decoupled: before the update, `RolloutCorrection` compares the proximal policy with the behavior
  policy. The driver calls it on the whole batch (`trainer.ppo.updating`).
- Bypass: the proximal policy is the behavior policy. During the update, `RolloutCorrection`
  compares the current policy with the behavior policy (`workers.roles.actor`).

`RolloutCorrection` returns importance weights, and the mask without rejected tokens. The metrics
have verl's names, under `rollout_corr/`; rows without tokens are not counted.

Tokens and sequences are rejected on which the trainer and the rollout engine disagree. With r =
trainer's probability / rollout's probability of a sampled token,

    k1 = -log r        k2 = (log r)^2 / 2        k3 = r - 1 - log r

estimate KL(rollout || trainer). A criterion bounds the estimate of each token (`token_k1`), or its
sum (`seq_sum_k1`), mean (`seq_mean_k1`) or maximum (`seq_max_k2`) over a sequence. The names are
verl's. A threshold is one number ("2.0") or "lower_upper" ("0.5_2.0").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.errors import ConfigError, nearest
from verl_like.tensor_ops import masked_mean, zero_outside
from workers.config import RolloutCorrectionConfig
from workers.losses.aggregate import Gauge, MaskedRows, row_blocks
from workers.losses.registry import LARGEST_LOG_RATIO

CRITERIA = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)
"""Allowed names in `rollout_rs`."""


@dataclass(frozen=True)
class Criterion:
    """One of `CRITERIA`, with the accepted range."""

    name: str
    bounds: Bounds
    """For k1, these are the logarithms of the thresholds, which are ratios 1 / r."""

    @property
    def judges_tokens(self) -> bool:
        """True if the criterion rejects single tokens."""
        return self.name.startswith("token")

    def figures(self, log_ratio: Tensor, mask: Tensor) -> Tensor:
        """Return estimates, [rows, R] for a token criterion, [rows, 1] for a sequence criterion.

        `log_ratio` is zero outside the mask, so k1, k2 and k3 are zero there, too.
        """
        level, _, estimator = self.name.rpartition("_")
        log_ratio = log_ratio.clamp(min=-LARGEST_LOG_RATIO, max=LARGEST_LOG_RATIO)
        if estimator == "k1":
            of_tokens = -log_ratio
        elif estimator == "k2":
            of_tokens = log_ratio.square() / 2
        else:
            of_tokens = torch.expm1(log_ratio) - log_ratio
        if level == "seq_sum":
            return of_tokens.sum(dim=-1, keepdim=True)
        if level == "seq_mean":
            return of_tokens.sum(dim=-1, keepdim=True) / lengths(mask)
        if level == "seq_max":  # k2 and k3 are never below zero
            return of_tokens.amax(dim=-1, keepdim=True)
        return of_tokens

    def accepts(self, figures: Tensor) -> Tensor:
        """Return a mask of the values inside the range, including its ends; NaN is outside."""
        accepted = figures <= self.bounds.upper
        return accepted if self.bounds.lower is None else accepted & (figures >= self.bounds.lower)


def lengths(mask: Tensor) -> Tensor:
    """Return the number of tokens per row, [rows, 1]; 1 for an empty row."""
    return mask.sum(dim=-1, keepdim=True).clamp(min=1)


def criteria_of(names: str | None, thresholds: str | None) -> tuple[Criterion, ...]:
    """Return the criteria of `rollout_rs` with their thresholds; both are comma-separated lists.

    A single threshold applies to all criteria.
    """
    if names is None:
        return ()
    chosen = _parts(names)
    for name in chosen:
        if name not in CRITERIA:
            raise ConfigError(
                f"{SECTION}.rollout_rs={names}: there is no criterion {name!r}. Known: "
                f"{', '.join(CRITERIA)}.{nearest(name, CRITERIA)}"
            )
        if chosen.count(name) > 1:
            raise ConfigError(f"{SECTION}.rollout_rs={names} names {name} twice.")

    texts = _parts(thresholds or "")
    if not chosen or len(texts) not in (1, len(chosen)):
        raise ConfigError(
            f"{SECTION}.rollout_rs={names} has {len(chosen)} criteria, but "
            f"{SECTION}.rollout_rs_threshold={thresholds} has {len(texts)} thresholds. Name at "
            "least one criterion, and set one threshold, or one per criterion."
        )
    texts = texts if len(texts) == len(chosen) else texts * len(chosen)
    criteria = []
    for name, text in zip(chosen, texts, strict=True):
        if name.endswith("k1"):
            lower, upper = ratio_bounds(text)
            bounds = Bounds(math.log(upper), math.log(lower))
        else:
            bounds = Bounds(divergence_bound(name, text))
        criteria.append(Criterion(name, bounds))
    return tuple(criteria)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


SECTION = "algorithm.rollout_correction"


@dataclass(frozen=True)
class Bounds:
    """The allowed range of a number; there is no lower end if `lower` is None."""

    upper: float
    lower: float | None = None


def weight_bounds(text: str) -> Bounds:
    """Parse `rollout_is_threshold`: one number, 1 or more, truncates weights.

    With two numbers, weights outside this range are set to zero.
    """
    key = f"{SECTION}.rollout_is_threshold"
    bounds = _numbers(key, text)
    if bounds.lower is not None:
        _require_order(key, text, bounds.lower, bounds.upper)
    elif bounds.upper < 1:
        raise ConfigError(
            f"{key}={text}: where the policies agree, the weight is 1, which a smaller limit "
            f"would truncate. Set a limit of 1 or more.{_misread(bounds.upper)}"
        )
    return bounds


def ratio_bounds(text: str) -> tuple[float, float]:
    """Parse the range of 1 / r in `rollout_rs_threshold`; a single u means 1/u to u."""
    key = f"{SECTION}.rollout_rs_threshold"
    bounds = _numbers(key, text)
    if bounds.lower is None and bounds.upper <= 1:
        raise ConfigError(
            f"{key}={text}: one number u keeps ratios from 1/u to u, and equal policies have the "
            f"ratio 1. Set u above 1.{_misread(bounds.upper)}"
        )
    lower = 1 / bounds.upper if bounds.lower is None else bounds.lower
    _require_order(key, text, lower, bounds.upper)
    return lower, bounds.upper


def divergence_bound(name: str, text: str) -> float:
    """Parse the largest k2 or k3 in `rollout_rs_threshold`; both are zero for equal policies."""
    key = f"{SECTION}.rollout_rs_threshold"
    bounds = _numbers(key, text)
    if bounds.lower is not None or bounds.upper <= 0:
        raise ConfigError(f"{key}={text}: {name} takes one upper limit above 0, such as 0.01.")
    return bounds.upper


def _numbers(key: str, text: str) -> Bounds:
    parts = text.strip().split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(map(math.isfinite, numbers)):
        raise ConfigError(
            f"{key}={text} is neither a number, such as 2.0, nor a range, such as 0.5_2.0. Write "
            "both bounds of a range with a decimal point."
        )
    return Bounds(numbers[-1], numbers[0] if len(numbers) == 2 else None)


def _require_order(key: str, text: str, lower: float, upper: float) -> None:
    if not 0 < lower < 1 < upper:
        raise ConfigError(
            f"{key}={text}: the lower bound is {lower:g} and must be above 0 and below 1; the "
            f"upper bound is {upper:g} and must be above 1 (the ratio of equal policies). Set a "
            "range such as 0.5_2.0."
        )


def _misread(number: float) -> str:
    """Return a hint about "0.5_5", which YAML and the command line parse as 0.55."""
    if not 0 < number < 1:
        return ""
    return " (0.5_5 is read as the number 0.55. Write both bounds with a decimal point: 0.5_5.0.)"


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
    def from_config(cls, settings: RolloutCorrectionConfig) -> RolloutCorrection:
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
            is_in_range = criterion.accepts(figures)
            gauge.spreads[name].add(part, figures, figures, criterion.judges_tokens)
            gauge.add_rejected(name, part.mask & is_in_range, part)
            accepted = accepted & is_in_range

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


class Spread(Gauge):
    """Accumulates the distribution of one quantity over tokens and over sequences."""

    def __init__(self, bounds: Bounds, ideal: float) -> None:
        """Count values outside `bounds` as high or low; `ideal` is the value for equal policies.

        For the standard deviation and the effective sample size, values are clamped to the upper
        bound, and to the lower bound or zero, whichever is less.
        """
        super().__init__()
        self.bounds = bounds
        self.ideal = ideal
        self.floor = min(0.0, bounds.lower or 0.0)

    def add(self, part: MaskedRows, values: Tensor, raw: Tensor, by_token: bool) -> None:
        """Add some rows; the values in `raw` are compared with the bounds.

        Unless `by_token`, all tokens of a row have the same value.
        """
        if not part.num_tokens:
            return
        tokens, rows = part.tokens(values).cpu().double(), part.rows(values).cpu().double()
        raw_rows = part.rows(raw).cpu()
        judged = part.tokens(raw).cpu() if by_token else raw_rows
        extremes = tokens if by_token else raw_rows.double()
        clamped = tokens.clamp(self.floor, self.bounds.upper)
        lower = -torch.inf if self.bounds.lower is None else self.bounds.lower
        self.note(
            {
                "tokens": len(tokens),
                "token_sum": tokens.sum(),
                "clamped_sum": clamped.sum(),
                "clamped_square": torch.dot(clamped, clamped),
                "judged": len(judged),
                "judged_high": torch.count_nonzero(judged > self.bounds.upper),
                "judged_low": torch.count_nonzero(judged < lower),
                "rows": len(rows),
                "row_sum": rows.sum(),
                "row_square": rows.square().sum(),
                "row_high": torch.count_nonzero(raw_rows > self.bounds.upper),
                "row_low": torch.count_nonzero(raw_rows < lower),
            },
            {
                "extreme": extremes.max(),
                "minus_extreme": -extremes.min(),
                "row": rows.max(),
                "minus_row": -rows.min(),
                "row_deviation": (rows - self.ideal).abs().max(),
            },
        )

    def metrics(self, is_weight: bool) -> dict[str, float]:
        """Return the metrics; empty without tokens."""
        total, largest = self.sums, self.maxima
        if not total:
            return {}

        rows, fraction = total["rows"], "ratio_fraction" if is_weight else "fraction"
        mean_square = total["clamped_square"] / total["tokens"]
        clamped_mean = total["clamped_sum"] / total["tokens"]
        row_squares = total["row_square"] - total["row_sum"] ** 2 / rows
        metrics = {
            "mean": total["token_sum"] / total["tokens"],
            "std": math.sqrt(max(mean_square - clamped_mean**2, 0.0)),
            "max": largest["extreme"],
            "min": -largest["minus_extreme"],
            f"{fraction}_high": total["judged_high"] / total["judged"],
            f"{fraction}_low": total["judged_low"] / total["judged"],
            "seq_mean": total["row_sum"] / rows,
            "seq_std": math.sqrt(max(row_squares, 0.0) / (rows - 1)) if rows > 1 else 0.0,
            "seq_max": largest["row"],
            "seq_min": -largest["minus_row"],
            "seq_max_deviation": largest["row_deviation"],
            "seq_fraction_high": total["row_high"] / rows,
            "seq_fraction_low": total["row_low"] / rows,
        }
        if is_weight:  # effective sample size per token
            square = total["clamped_square"]
            effective = total["clamped_sum"] ** 2 / square if square else 0.0
            metrics["eff_sample_size"] = effective / total["tokens"]
        return metrics


class CorrectionGauge(Gauge):
    """Accumulates the metrics of a correction. Each counter is a pair (part, whole)."""

    def __init__(self, weights: Bounds | None, criteria: dict[str, Bounds]) -> None:
        """Take the bounds of the importance weights, and those of each criterion by name.

        Truncated weights have no lower bound; weights below 1 / upper count as low.
        """
        super().__init__()
        self.spreads: dict[str, Spread] = {}
        if weights is not None:
            lower = 1 / weights.upper if weights.lower is None else weights.lower
            self.spreads["rollout_is"] = Spread(Bounds(weights.upper, lower), ideal=1.0)
        for name, bounds in criteria.items():
            self.spreads[f"rollout_rs_{name}"] = Spread(bounds, ideal=0.0)

    def add_fraction(self, name: str, part: float | Tensor, total: int) -> None:
        """Add `part` and `total` to the counts of a fraction."""
        self.note({name: part, f"{name} of": total})

    def add_rejected(self, name: str, accepted: Tensor, part: MaskedRows) -> None:
        """Add the fractions of rejected tokens and of rows with a rejected token."""
        of_rows = (part.mask & ~accepted).sum(dim=-1)
        self.add_fraction(f"{name}_masked_fraction", of_rows.sum(), part.num_tokens)
        self.add_fraction(f"{name}_seq_masked_fraction", (of_rows > 0).sum(), part.num_rows)

    def all_reduce(self, group: dist.ProcessGroup | None) -> None:
        """Combine the counts of all ranks; every rank must call this."""
        for gauge in self.spreads.values():
            gauge.all_reduce(group)
        super().all_reduce(group)

    def metrics(self) -> dict[str, float]:
        """Return the metrics under verl's names."""
        metrics = {}
        for name, spread in self.spreads.items():
            for figure, value in spread.metrics(name == "rollout_is").items():
                metrics[f"rollout_corr/{name}_{figure}"] = value
        for name, part in self.sums.items():
            total = self.sums.get(f"{name} of")
            if total:
                metrics[f"rollout_corr/{name}"] = part / total
        return metrics
