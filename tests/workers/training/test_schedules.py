"""Learning-rate schedules next to their definitions, step by step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from verl_like.errors import ConfigError
from workers.config import OptimConfig
from workers.training.schedules import LR_SCHEDULES, check_optim, lr_factor

TOTAL = 20
WARMUP = 4


def cosine_twin(done: int, left: int, low: float) -> float:
    return low + (1 - low) * (1 + math.cos(math.pi * done / (done + left))) / 2


def linear_twin(done: int, left: int, low: float) -> float:
    return (left + low * done) / (done + left)


def constant_twin(done: int, left: int, low: float) -> float:
    return 1.0


def wsd_twin(done: int, left: int, low: float) -> float:
    """The last quarter of the 16 steps after the warm-up decays."""
    return 1.0 if left >= 4 else (left + low * (4 - left)) / 4


TWINS = {
    "constant": constant_twin,
    "cosine": cosine_twin,
    "linear": linear_twin,
    "wsd": wsd_twin,
}


def optim(name: str, **changes: Any) -> OptimConfig:
    settings = {"lr_warmup_steps": WARMUP, "min_lr_ratio": 0.1, "wsd_decay_ratio": 0.25}
    return OptimConfig(lr_scheduler_type=name, **settings | changes)


def curve(config: OptimConfig, num_calls: int = TOTAL + 3) -> list[float]:
    return [lr_factor(step, TOTAL, config) for step in range(num_calls)]


@pytest.mark.parametrize("name", LR_SCHEDULES)
def test_a_schedule_matches_its_definition(name: str) -> None:
    expected = [(step + 1) / (WARMUP + 1) for step in range(WARMUP)]
    for step in range(WARMUP, TOTAL + 3):
        left = max(TOTAL - step, 0)
        expected.append(TWINS[name](TOTAL - WARMUP - left, left, 0.1))
    assert curve(optim(name)) == pytest.approx(expected, rel=1e-12)


def test_a_warmup_ratio_equals_that_number_of_steps() -> None:
    by_ratio = optim("wsd", lr_warmup_steps=-1, lr_warmup_steps_ratio=0.2)
    assert curve(by_ratio) == curve(optim("wsd"))
    assert lr_factor(0, TOTAL, optim("cosine", lr_warmup_steps=-1)) == 1.0


def halved(progress: float, min_lr_ratio: float) -> float:
    return 0.5 + min_lr_ratio


def asks_for_more(progress: float, min_lr_ration: float) -> float:
    return min_lr_ration


def test_a_user_s_schedule_is_found_by_its_path_and_gets_its_settings() -> None:
    assert lr_factor(WARMUP, TOTAL, optim(f"{__name__}.halved")) == 0.6


def test_a_parameter_that_is_no_key_is_rejected_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'min_lr_ration' is not a key.*'min_lr_ratio'"):
        check_optim(optim(f"{__name__}.asks_for_more"), "optim")


def test_an_unknown_schedule_is_rejected_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'cosine'"):
        check_optim(optim("cosin"), "optim")
