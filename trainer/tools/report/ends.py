"""One table of several runs: how each ended, the settings that differ, the metrics at the end."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trainer.config.keys import NAMES_OF_A_RUN
from trainer.run_folder.folder import CONFIG_FILE, saved_config
from trainer.run_folder.metrics import KL_NAMES, metric_names
from trainer.tools.report.figures import panels_of
from trainer.tools.report.read import RunData, read_run

SEED, STEP_TIME, ABSENT = "trainer.seed", "timing_s/step", "-"
END_SHARE = 0.1


def table_of_runs(folders: Sequence[str | Path]) -> list[list[str]]:
    """Return rows of text with a column per run; runs that differ only in the seed share one.

    A metric's end is the mean of the last tenth of its values; ± is the deviation over seeds.
    """
    paths = [Path(folder).resolve() for folder in folders]
    common, runs = Path(os.path.commonpath(paths)), [read_run(path) for path in paths]
    configs = [saved_config(path) if (path / CONFIG_FILE).is_file() else {} for path in paths]
    differing = {
        key: [config.get(key, ABSENT) for config in configs]
        for key in dict.fromkeys(key for config in configs for key in config)
        if key not in NAMES_OF_A_RUN
    }
    differing = {key: values for key, values in differing.items() if len({*map(repr, values)}) > 1}
    columns: dict[str, list[int]] = {}
    for number, path in enumerate(paths):
        settings = [values[number] for key, values in differing.items() if key != SEED]
        columns.setdefault(repr(settings if configs[number] else path), []).append(number)

    def row(title: str, cells: Iterable[Any]) -> list[str]:
        texts = [str(cell) for cell in cells]
        groups = [dict.fromkeys(texts[n] for n in numbers) for numbers in columns.values()]
        return [title, *map(", ".join, groups)]

    rows = [row("", [path.relative_to(common) if path != common else path.name for path in paths])]
    rows.append(row("end", map(end_of, runs)))
    rows.append(row("steps", [max((int(x["step"]) for x in r.metrics), default=0) for r in runs]))
    rows += [row(key, values) for key, values in differing.items()]
    for metric in reported_metrics(runs):
        ends = [last_values(run, metric) for run in runs]
        cells = [[end for n in numbers for end in ends[n]] for numbers in columns.values()]
        rows.append([metric, *map(mean_and_deviation, cells)])
    return rows


def end_of(run: RunData) -> str:
    lines = run.failure.strip().splitlines()
    return lines[-1] if lines else "no failure"


def reported_metrics(runs: Sequence[RunData]) -> list[str]:
    """Return the metrics of the runs' reports, and the time of a step."""
    names: dict[str, None] = {}
    for run in runs:
        known = metric_names(run.metrics)
        for panel in panels_of(run.metrics):
            names |= dict.fromkeys(panel.names_among(known))
        names |= dict.fromkeys([STEP_TIME] if STEP_TIME in known else [])
    # a KL that is always 0 compares a policy with itself
    return [n for n in names if n not in KL_NAMES or any(any(run.series(n)[1]) for run in runs)]


def last_values(run: RunData, metric: str) -> list[float]:
    """Return the mean of the last tenth of a metric's values; [] for a run without it."""
    values = [value for value in run.series(metric)[1] if math.isfinite(value)]
    return [statistics.fmean(values[-max(1, round(END_SHARE * len(values))) :])] if values else []


def mean_and_deviation(numbers: Sequence[float]) -> str:
    if not numbers:
        return ABSENT
    mean = f"{statistics.fmean(numbers):.4g}"
    return f"{mean} ± {statistics.stdev(numbers):.2g}" if len(numbers) > 1 else mean
