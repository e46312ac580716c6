"""Learning-rate schedules by name, and the warm-up that precedes all of them.

    @LR_SCHEDULES.register("mine")
    def mine(progress: float, min_lr_ratio: float) -> float: ...

A schedule gets the progress after the warm-up, from 0 to 1, and returns a factor of the peak rate.
Its other parameters get their values from the keys of the same name in the section `optim`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from verl_like.errors import ConfigError, nearest
from verl_like.registry import Registry
from verl_like.signatures import CallSignature, check_call, signature_of

if TYPE_CHECKING:
    from workers.config import OptimConfig

LRSchedule = Callable[..., float]


def _check(schedule: Any, subject: str) -> None:
    """Reject a schedule whose first parameter cannot be the progress."""
    signature = signature_of(schedule) if callable(schedule) else None
    names = list(signature.parameters) if signature else []
    check_call(schedule, subject, CallSignature("progress", by_name=names[1:]))


LR_SCHEDULES: Registry[LRSchedule] = Registry("learning-rate schedule", _check)
"""Names for `optim.lr_scheduler_type`."""


@LR_SCHEDULES.register("constant")
def constant(progress: float) -> float:
    """The peak rate until the end.

    Source: verl's `constant`
    """
    return 1.0


@LR_SCHEDULES.register("cosine")
def cosine(progress: float, min_lr_ratio: float) -> float:
    """Half a cosine from the peak rate to `min_lr_ratio` times the peak.

    Source: SGDR without restarts, arXiv 1608.03983
    """
    remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_lr_ratio + (1.0 - min_lr_ratio) * remaining


@LR_SCHEDULES.register("linear")
def linear(progress: float, min_lr_ratio: float) -> float:
    """A straight line from the peak rate to `min_lr_ratio` times the peak.

    Source: BERT, arXiv 1810.04805, appendix A.2
    """
    return min_lr_ratio + (1.0 - min_lr_ratio) * (1.0 - progress)


@LR_SCHEDULES.register("wsd")
def warmup_stable_decay(progress: float, min_lr_ratio: float, wsd_decay_ratio: float) -> float:
    """The peak rate, then a straight line to `min_lr_ratio` times the peak in the last
    `wsd_decay_ratio` of the update calls after the warm-up.

    Source: MiniCPM (WSD), arXiv 2404.06395; straight line: arXiv 2405.18392
    """
    remaining = min(1.0, (1.0 - progress) / wsd_decay_ratio)
    return min_lr_ratio + (1.0 - min_lr_ratio) * remaining


def lr_factor(step: int, total_steps: int, config: OptimConfig) -> float:
    """Return the factor of the peak rate in update call `step` (from 0): warm-up, then the
    schedule.

        lr = config.lr * lr_factor(step, total_steps, config)

    During the warm-up, the factor rises in equal steps.
    """
    warmup = config.lr_warmup_steps
    if warmup < 0:
        warmup = int(config.lr_warmup_steps_ratio * total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)

    schedule = LR_SCHEDULES.look_up(config.lr_scheduler_type)
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return schedule(progress, **_settings_of(schedule, config))


def check_optim(config: OptimConfig, section: str) -> None:
    """Reject invalid betas, and a schedule with a parameter that the config does not have."""
    if len(config.betas) != 2 or not all(0 <= beta < 1 for beta in config.betas):
        raise ConfigError(
            f"{section}.betas={list(config.betas)}: it must be two numbers, each from 0 to below 1."
        )
    _settings_of(LR_SCHEDULES.look_up(config.lr_scheduler_type), config)


def _settings_of(schedule: LRSchedule, config: OptimConfig) -> dict[str, Any]:
    """Return the values of a schedule's parameters after the first, from the section `optim`."""
    _, *names = inspect.signature(schedule).parameters
    for name in names:
        if not hasattr(config, name):
            raise ConfigError(
                f"optim.lr_scheduler_type={config.lr_scheduler_type}: its parameter "
                f"{name!r} is not a key of the section "
                f"optim.{nearest(name, vars(config))}"
            )
    return {name: getattr(config, name) for name in names}
