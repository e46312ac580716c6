"""The rollout correction in plain Python, row by row: log-ratios, weights, criteria."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from tests.workers.losses.plain_python import Columns, tokens_of
from workers.config import RolloutCorrectionConfig
from workers.losses.correction import RolloutCorrection

LEVELS = ("token", "sequence", "geometric")
SUMMED = ("seq_sum", "seq_max")


def threshold_of(name: str) -> str:
    """Return a threshold that rejects some of the example's tokens and keeps some."""
    if name.endswith("k1"):
        return "0.66_1.4"
    return "0.2" if name.startswith(SUMMED) else "0.1"


def corrected(
    log_prob: Tensor, behavior: Tensor, mask: Tensor, **settings: Any
) -> tuple[Tensor | None, Tensor, dict[str, float]]:
    """Return (weights, mask, metrics) for the configuration's settings."""
    correction = RolloutCorrection.from_config(RolloutCorrectionConfig(**settings))
    gauge = correction.gauge()
    weights, remaining = correction(log_prob, behavior, mask, gauge)
    return weights, remaining, gauge.metrics()


def plain_log_ratios(batch: Columns) -> list[list[float]]:
    """Return the trainer's minus the rollout's log-prob of each token, by row."""
    mask = batch["response_mask"]
    pairs = zip(
        tokens_of(batch["log_prob"], mask), tokens_of(batch["old_log_prob"], mask), strict=True
    )
    return [[new - old for new, old in zip(*row, strict=True)] for row in pairs]


def plain_ratios(row: list[float], level: str) -> list[float]:
    if level == "token" or not row:
        return [math.exp(x) for x in row]
    total = math.prod(math.exp(x) for x in row)
    return [total if level == "sequence" else total ** (1 / len(row))] * len(row)


def plain_values(row: list[float], name: str) -> list[float]:
    """Return a criterion's value for every token of a row."""
    level, _, estimator = name.rpartition("_")
    formulas = {
        "k1": lambda x: -x,
        "k2": lambda x: x * x / 2,
        "k3": lambda x: math.exp(x) - 1 - x,
    }
    values = [formulas[estimator](x) for x in row]
    if level == "token" or not row:
        return values
    reduced = {"seq_sum": sum(values), "seq_mean": sum(values) / len(row), "seq_max": max(values)}
    return [reduced[level]] * len(row)


def plain_keeps(value: float, name: str) -> bool:
    threshold = threshold_of(name)
    if "_" in threshold:
        lower, upper = map(float, threshold.split("_"))
        return math.log(lower) <= value <= math.log(upper)
    return value <= float(threshold)
