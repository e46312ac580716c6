"""Metrics of a step: their reduction to one number each, the console's headline, and targets.

`trainer.run_folder.tracking` shows the headline.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from verl_like.errors import BatchError, ConfigError, nearest

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


KL_NAMES = ("actor/reward_kl_penalty", "actor/kl_loss", "actor/ppo_kl")
"""The KL to show: to the reference if the run has one, or to the policy before the update."""
ROUNDING = 1e-8
"""A KL of at most this size counts as 0."""
WATCHED = {"actor/entropy": "entropy", "response_length/mean": "length", "actor/pg_loss": "loss"}
"""Further metrics of a step -> their names on the console."""


def headline(metrics: Mapping[str, float]) -> list[str]:
    """Return the reward, KL, entropy, length, loss and speed, as far as a recipe has them."""
    numbers = []
    if "critic/score/mean" in metrics:
        numbers.append(f"reward {metrics['critic/score/mean']:.4g}")

    kl = next((metrics[name] for name in KL_NAMES if name in metrics), 0.0)
    if abs(kl) > ROUNDING:  # a KL of 0 compares a policy with itself
        numbers.append(f"KL {kl:.3g}")

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
