"""Reduce the metrics of ranks and mini-batches to one number per name and step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from verl_like.errors import BatchError

PEAKS = ("perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb")


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return one number for each name, from a list of numbers (such as one per mini-batch).

    A name whose last word is max or min (`…/max`, `…_max`), and verl's two memory peaks, take that
    extreme; every other name takes the mean. Only the last word of a name decides.
    """
    return {name: _one_number(name, values) for name, values in metrics.items()}


def _one_number(name: str, values: Any) -> float:
    if type(values) is list and len(values) == 1 and type(values[0]) is float:
        return values[0]  # the usual case: one rank
    numbers = np.asarray([float(value) for value in np.atleast_1d(values)], dtype=np.float64)
    if not numbers.size:
        raise BatchError("a metric with no values cannot be reduced; leave its name out.")
    last_word = name.replace("/", "_").rpartition("_")[-1]
    if last_word == "max" or name in PEAKS:
        return float(numbers.max())
    return float(numbers.min() if last_word == "min" else numbers.mean())
