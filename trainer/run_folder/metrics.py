"""One number for each metric of a step, out of those of its ranks and mini-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from verl_like.errors import BatchError

_PEAKS = ("perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb")


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """One number for each name, from a list of them (one per mini-batch, say).

    The rule: a name whose last word is max or min (`…/max`, `…_max`), and verl's two memory peaks,
    take that extreme; every other name takes the mean. Words in the middle of a name decide
    nothing.
    """
    return {
        name: values[0] if _is_one_float(values) else _reduction(name)(_numbers(values))
        for name, values in metrics.items()
    }


def _is_one_float(values: Any) -> bool:
    """That of a lone rank, as most are: it is its own mean and extreme."""
    return type(values) is list and len(values) == 1 and type(values[0]) is float


def _reduction(name: str) -> Callable[[np.ndarray], float]:
    last_word = name.replace("/", "_").rpartition("_")[-1]
    if last_word == "max" or name in _PEAKS:
        return lambda numbers: float(numbers.max())
    if last_word == "min":
        return lambda numbers: float(numbers.min())
    return lambda numbers: float(numbers.mean())


def _numbers(values: Any) -> np.ndarray:
    numbers = np.asarray([float(value) for value in np.atleast_1d(values)], dtype=np.float64)
    if not numbers.size:
        raise BatchError("a metric with no values cannot be reduced; leave its name out.")
    return numbers
