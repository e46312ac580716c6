"""The ratio of the policy to the old policy, and the range that it is clipped to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from verl_like.errors import ConfigError

LARGEST_LOG_RATIO = 20.0
"""Log-ratios are clamped to this on both sides, so that their exponential stays finite."""


class ClipSettings(Protocol):
    """What policy losses read of the actor's section of the configuration."""

    clip_ratio: float
    clip_ratio_low: float | None
    clip_ratio_high: float | None
    clip_ratio_c: float


@dataclass
class DefaultClip:
    """The settings of a call that gives none: the configuration's defaults."""

    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0


def log_ratio(log_prob: Tensor, old_log_prob: Tensor, inside: Tensor) -> Tensor:
    """log(policy / old policy), clamped; zero and without gradient outside the mask."""
    difference = torch.where(inside, log_prob - old_log_prob, 0)
    return difference.clamp(min=-LARGEST_LOG_RATIO, max=LARGEST_LOG_RATIO)


def clip_range(config: ClipSettings) -> tuple[float, float]:
    """(least, largest) ratio by the actor's clip settings."""
    low, high = resolve_clip(config.clip_ratio, config.clip_ratio_low, config.clip_ratio_high)
    return 1.0 - low, 1.0 + high


def resolve_clip(
    clip_ratio: float | None, low: float | None = None, high: float | None = None
) -> tuple[float, float]:
    """(lower, upper) clip range: `clip_ratio` is both, unless one is set for itself."""
    lower = clip_ratio if low is None else low
    upper = clip_ratio if high is None else high
    if lower is None or upper is None:
        raise ConfigError(
            "a policy loss needs clip_ratio, or both clip_ratio_low and clip_ratio_high."
        )
    return lower, upper
