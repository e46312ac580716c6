"""The numbers of a comparison: the end and the best of each metric, with the spread over seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from trainer.compare.runs import ComparedRun
from trainer.report.figures import panels_of
from trainer.rollouts.headline import KL_NAMES

LOWER_IS_BETTER = ("*/loss", "loss", "timing_s/step")
"""Metrics whose lowest value is the best; a policy's loss (`actor/pg_loss`) is none of them."""
HIGHER_IS_BETTER = (
    "val-core/*",
    "critic/score/mean",
    "critic/rewards/mean",
    "*accuracy",
    "perf/throughput",
)
"""Metrics whose highest value is the best, where they are not in `LOWER_IS_BETTER`."""
END_SHARE = 0.1
"""Share of a metric's values, the last ones, whose mean is its end."""


@dataclass(frozen=True)
class Figure:
    """A number of a group of runs: its mean, and its standard deviation over the seeds."""

    mean: float
    deviation: float | None
    """None for a single run."""

    def __str__(self) -> str:
        """Four digits, and two of the spread."""
        if self.deviation is None:
            return f"{self.mean:.4g}"
        return f"{self.mean:.4g} ± {self.deviation:.2g}"


def metrics_shown(runs: Sequence[ComparedRun]) -> list[str]:
    """The metrics that the report of any of the runs draws, and the time of a step."""
    found: dict[str, None] = {}
    for run in runs:
        known = dict.fromkeys(name for line in run.data.metrics for name in line)
        for panel in panels_of(run.data):
            for pattern in panel.names:
                found |= dict.fromkeys(n for n in known if fnmatchcase(n, pattern))
        found |= dict.fromkeys(name for name in ("timing_s/step",) if name in known)
    return [name for name in found if name not in KL_NAMES or _is_ever_set(runs, name)]


def _is_ever_set(runs: Sequence[ComparedRun], metric: str) -> bool:
    """Whether it is not 0 throughout, as is the KL of a policy to itself."""
    return any(value for run in runs for value in run.data.series(metric)[1])


def end_of(runs: Sequence[ComparedRun], metric: str) -> Figure | None:
    """The mean of a metric's last tenth of values, over the runs that have it."""
    ends = []
    for run in runs:
        values = finite(run.data.series(metric)[1])
        if values:
            last = values[-max(1, round(END_SHARE * len(values))) :]
            ends.append(sum(last) / len(last))
    return over_runs(ends)


def best_of(runs: Sequence[ComparedRun], metric: str) -> Figure | None:
    """The mean over the runs of the best value that each had; None where no end is the better."""
    better = _better(metric)
    if better is None:
        return None
    series = [finite(run.data.series(metric)[1]) for run in runs]
    return over_runs([better(values) for values in series if values])


def _better(metric: str) -> Callable[[list[float]], float] | None:
    if any(fnmatchcase(metric, pattern) for pattern in LOWER_IS_BETTER):
        return min
    if any(fnmatchcase(metric, pattern) for pattern in HIGHER_IS_BETTER):
        return max
    return None


def over_runs(numbers: Sequence[float]) -> Figure | None:
    """Mean and sample standard deviation."""
    if not numbers:
        return None
    mean = sum(numbers) / len(numbers)
    if len(numbers) == 1:
        return Figure(mean, None)
    variance = sum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1)
    return Figure(mean, math.sqrt(variance))


def finite(values: Sequence[float]) -> list[float]:
    """Without NaN and infinity."""
    return [value for value in values if math.isfinite(value)]
