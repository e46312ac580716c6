"""Metrics of a step: their reduction to one number each, the console's headline, and targets.

The functions at the end read `metrics.jsonl`.

`trainer.run_folder.tracking` shows the headline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verl_like.errors import BatchError, ConfigError, nearest
from verl_like.files import json_objects

MetricLines = Sequence[Mapping[str, float]]
"""A line for each step."""
COUNTED = ("step", "timing_s/", "perf/", "training/", "async/")
"""Prefixes of metrics that a run counts or times."""
SAMPLED, TRAINED = "training/num_sampled_tokens", "training/num_trained_tokens"
LEFT_OUT = "training/num_excluded_tokens/"
"""Prefix of a metric's name, followed by the reason."""
PEAKS = ("perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb")


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return one number for each name, from a list of numbers (such as one per mini-batch).

        reduce_metrics({"loss": [1.0, 3.0], "x/max": [1.0, 3.0]})   # {"loss": 2.0, "x/max": 3.0}

    A name whose last word is max or min (`…/max`, `…_max`), and verl's two memory peaks, are
    reduced by max or min, all others by the mean.
    """
    return {name: _one_number(name, values) for name, values in metrics.items()}


def _one_number(name: str, values: Any) -> float:
    if type(values) is list and len(values) == 1 and type(values[0]) is float:
        return values[0]  # the usual case: one rank
    numbers = np.asarray([float(value) for value in np.atleast_1d(values)], dtype=np.float64)
    if not numbers.size:
        raise BatchError(f"metric {name!r} has no values to reduce. Leave it out of the metrics.")
    last_word = name.replace("/", "_").rpartition("_")[-1]
    if last_word == "max" or name in PEAKS:
        return float(numbers.max())
    return float(numbers.min() if last_word == "min" else numbers.mean())


KL_NAMES = {
    "actor/reward_kl_penalty": "KL",
    "actor/kl_loss": "KL",
    "actor/ppo_kl": "KL(old)",
}
"""Metric -> its name on the console: the KL to the reference if the run has one, or the KL to the
policy before the update. The first one of a step is shown."""
ROUNDING = 1e-8
"""A KL of at most this size counts as 0."""
WATCHED = {"actor/entropy": "entropy", "response_length/mean": "length", "actor/pg_loss": "loss"}
"""Further metrics of a step -> their names on the console."""


def headline(metrics: Mapping[str, float]) -> list[str]:
    """Return the reward, KL, entropy, length, loss and speed, as far as a recipe has them."""
    numbers = []
    if "critic/score/mean" in metrics:
        numbers.append(f"reward {metrics['critic/score/mean']:.4g}")

    kl = next((name for name in KL_NAMES if name in metrics), None)
    if kl and abs(metrics[kl]) > ROUNDING:  # a KL of 0 compares a policy with itself
        numbers.append(f"{KL_NAMES[kl]} {metrics[kl]:.3g}")

    for name, shown in WATCHED.items():
        if name in metrics:
            numbers.append(f"{shown} {metrics[name]:.3g}")

    if metrics.get("perf/time_per_step", 0.0) > 0:
        speed = metrics["perf/total_num_tokens"] / metrics["perf/time_per_step"]
        numbers.append(f"{speed:.0f} tokens/s")
    return numbers


def describe_reached_target(metrics: Mapping[str, float], targets: Mapping[str, float]) -> str:
    """Return a description of the first metric that reached its target, or "" if none did.

    `targets` maps names to numbers, as `trainer.stop_at`; a metric reaches its target from below.
    Validation metrics may be missing from a step; another missing metric is a `ConfigError`.

    Example:

        describe_reached_target({"critic/score/mean": 0.8}, targets={"critic/score/mean": 0.75})
    """
    for name, target in targets.items():
        if name not in metrics and not name.startswith("val"):
            raise ConfigError(
                f"trainer.stop_at names {name!r}, which this step's metrics lack."
                f"{nearest(name, metrics)}"
            )
        if name in metrics and metrics[name] >= target:
            return (
                f"{name}={metrics[name]:.4g} has reached {target:g}, so the run ends here "
                "(trainer.stop_at)"
            )
    return ""


def read_lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Return the JSON objects of a file, line by line; broken lines are noted and left out."""
    if not path.is_file():
        notes.append(f"{path.name} is missing.")
        return []
    rows, broken = json_objects(path)
    if broken:
        notes.append(
            f"{path.name}: {broken} of {broken + len(rows)} lines are incomplete and are left out."
        )
    return rows


def read_metrics(path: Path, notes: list[str]) -> list[dict[str, float]]:
    """Return the metrics of every step."""
    rows = [
        {name: v for name, v in row.items() if is_number(v) and not _is_damaged(name, v)}
        for row in read_lines(path, notes)
    ]
    steps = [row for row in rows if "step" in row]
    if len(steps) < len(rows):
        notes.append(
            f"{path.name}: {len(rows) - len(steps)} of {len(rows)} lines have no step and are "
            "left out."
        )
    return steps


def _is_damaged(name: str, value: float) -> bool:
    """Return whether a count or a time is nan or infinite, which only a changed file has."""
    return name.startswith(COUNTED) and not math.isfinite(value)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def series(metrics: MetricLines, name: str) -> tuple[list[float], list[float]]:
    """Return (steps, values) of a metric, from the lines that have it."""
    lines = [line for line in metrics if name in line]
    return [line["step"] for line in lines], [line[name] for line in lines]


def metric_names(metrics: MetricLines) -> list[str]:
    """Return the names of all metrics, in the order in which the steps have them."""
    return list(dict.fromkeys(name for line in metrics for name in line))


def evenly_spaced(items: Sequence[Any], limit: int) -> list[Any]:
    """Return at most `limit` of the items, evenly spaced from the first to the last."""
    if len(items) <= limit:
        return list(items)
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]
