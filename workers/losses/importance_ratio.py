"""The ratio of the policy to the old policy, and its clip range.

Tensors are [rows, R], with R response tokens; `mask` is a bool.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.config import ActorConfig

CLIP_RANGE = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
"""Keys of the actor section that set the clip range."""
LARGEST_LOG_RATIO = 20.0
"""Log-ratios are clamped to this on both sides, so that their exponential stays finite."""


def log_ratio(log_prob: Tensor, old_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return log(policy / old policy), clamped; outside the mask it is zero.

    Clamped values, and values outside the mask, have no gradient.
    """
    difference = zero_outside(log_prob - old_log_prob, mask)
    clamped = difference.detach().clamp(min=-LARGEST_LOG_RATIO, max=LARGEST_LOG_RATIO)
    # NaN is not clamped: its gradient is NaN, too, so the step is skipped
    return torch.where(difference.abs() >= LARGEST_LOG_RATIO, clamped, difference)


def clip_widths(config: ActorConfig) -> tuple[float, float]:
    """Return `clip_ratio_low` and `clip_ratio_high`; the default of both is `clip_ratio`."""
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return config.clip_ratio if low is None else low, config.clip_ratio if high is None else high


def clip_range(config: ActorConfig) -> tuple[float, float]:
    """Return the (smallest, largest) allowed ratio."""
    low, high = clip_widths(config)
    return 1.0 - low, 1.0 + high
