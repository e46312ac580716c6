"""Parse the thresholds of the rollout correction; errors name the key.

`algorithm.rollout_correction` writes a threshold as one number ("2.0") or as "lower_upper"
("0.5_2.0").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from verl_like.errors import ConfigError

SECTION = "algorithm.rollout_correction"


@dataclass(frozen=True)
class Bounds:
    """The range of a number; without `lower` there is no lower end."""

    upper: float
    lower: float | None = None


def weight_bounds(text: str) -> Bounds:
    """Parse `rollout_is_threshold`: one number (1 or more) truncates, two numbers mask."""
    key = f"{SECTION}.rollout_is_threshold"
    bounds = _numbers(key, text)
    if bounds.lower is not None:
        _require_order(key, text, bounds.lower, bounds.upper)
    elif bounds.upper < 1:
        raise ConfigError(
            f"{key}={text}: equal policies weigh 1; truncate at 1 or more.{_misread(bounds.upper)}"
        )
    return bounds


def ratio_bounds(text: str) -> tuple[float, float]:
    """Parse a ratio in `rollout_rs_threshold`: (lower, upper); a single u means 1/u to u."""
    key = f"{SECTION}.rollout_rs_threshold"
    bounds = _numbers(key, text)
    if bounds.lower is None and bounds.upper <= 1:
        raise ConfigError(
            f"{key}={text}: a ratio of equal policies is 1, and one number u keeps those from 1/u "
            f"to u; take more than 1.{_misread(bounds.upper)}"
        )
    lower = 1 / bounds.upper if bounds.lower is None else bounds.lower
    _require_order(key, text, lower, bounds.upper)
    return lower, bounds.upper


def divergence_bound(name: str, text: str) -> float:
    """Parse the largest k2 or k3 that `rollout_rs_threshold` allows; equal policies have zero."""
    key = f"{SECTION}.rollout_rs_threshold"
    bounds = _numbers(key, text)
    if bounds.lower is not None or bounds.upper <= 0:
        raise ConfigError(
            f"{key}={text}: {name} is never below zero; give it one number above 0, such as 0.01."
        )
    return bounds.upper


def _numbers(key: str, text: str) -> Bounds:
    parts = text.strip().split("_")
    try:
        numbers = [float(part) for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not all(map(math.isfinite, numbers)):
        raise ConfigError(
            f"{key}={text}: give one number, or lower_upper such as 0.5_2.0 (both with a point)."
        )
    return Bounds(numbers[-1], numbers[0] if len(numbers) == 2 else None)


def _require_order(key: str, text: str, lower: float, upper: float) -> None:
    if not 0 < lower < 1 < upper:
        raise ConfigError(
            f"{key}={text}: the range from {lower:g} to {upper:g} must lie above 0 and have 1 "
            "inside, the ratio of equal policies; such as 0.5_2.0."
        )


def _misread(number: float) -> str:
    """Return a hint for "0.5_5" on the command line, which arrives as 0.55."""
    if not 0 < number < 1:
        return ""
    return " (0.5_5 is read as the number 0.55: write both ends with a point, 0.5_5.0.)"
