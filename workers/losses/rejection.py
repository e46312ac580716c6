"""Reject tokens and sequences on which the trainer and the rollout engine disagree.

With r = trainer's probability / rollout's probability of a sampled token,

    k1 = -log r        k2 = (log r)^2 / 2        k3 = r - 1 - log r

estimate KL(rollout || trainer). A criterion bounds the estimate of each token (`token_k1`), or its
sum (`seq_sum_k1`), mean (`seq_mean_k1`) or maximum (`seq_max_k2`) over a sequence. The names are
verl's.

In `algorithm.rollout_correction`, a threshold is one number ("2.0") or "lower_upper" ("0.5_2.0").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_like.errors import ConfigError, nearest
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
