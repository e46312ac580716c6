"""The tables of a comparison, as rows of text: a heading, then a row for each compared item.

The terminal (`comparison_text`) and the page show the same tables.
"""

from __future__ import annotations

import glob
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from trainer.config.flat import NAMES_OF_A_RUN
from trainer.run_folder.folder import CONFIG_FILE, saved_config
from trainer.run_folder.metrics import KL_NAMES, metric_names
from trainer.tools.report import figures
from trainer.tools.report.figures import COLORS, Panel, panels_of
from trainer.tools.report.page import page_of
from trainer.tools.report.read import STOPPED, RunData, phase_shares, read_run
from verl_like.errors import ConfigError
from verl_like.files import write_whole
from verl_like.terminal import draw_table, printable

SEED = "trainer.seed"
ABSENT = "-"
"""The value of a key that a run does not know."""


@dataclass(frozen=True)
class ComparedRun:
    """A run folder that was read."""

    name: str
    """The part of its path that differs from the other runs' paths."""
    data: RunData
    config: Mapping[str, Any]
    """Dotted key -> value."""

    @property
    def outcome(self) -> str:
        if not self.data.failure:
            return "no failure"
        if self.data.failure.startswith(STOPPED):
            return "stopped"
        last_line = self.data.failure.strip().splitlines()[-1]
        return f"failed: {last_line}"


def read_runs(folders: Sequence[str | Path]) -> list[ComparedRun]:
    """Return the runs, in the given order; raise for fewer than two."""
    paths = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    if len(paths) < 2:
        raise ConfigError(
            f"a comparison needs two or more run folders, but this command names {len(paths)}: "
            f"{', '.join(map(str, paths)) or 'none'}."
        )
    common = Path(os.path.commonpath(paths))
    runs = []
    for path in paths:
        name = str(path.relative_to(common)) if path != common else path.name
        config = saved_config(path) if (path / CONFIG_FILE).is_file() else {}
        runs.append(ComparedRun(name, read_run(path), config))
    return runs


def differing_keys(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the keys that differ between runs, except the runs' names."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    differing = []
    for key in keys:
        values = [run.config.get(key, ABSENT) for run in runs]
        if key not in NAMES_OF_A_RUN and any(value != values[0] for value in values):
            differing.append(key)
    return differing


def groups_by_seed(runs: Sequence[ComparedRun]) -> dict[str, list[ComparedRun]]:
    """Return groups of runs that differ only in their seed, by the name of the first run.

    A run of another configuration is a group of its own.
    """
    told_apart = [key for key in differing_keys(runs) if key != SEED]
    groups: dict[str, list[ComparedRun]] = {}
    names: dict[str, str] = {}
    for run in runs:
        # a run without a configuration cannot be grouped
        settings = [run.config.get(key, ABSENT) for key in told_apart] if run.config else run.name
        name = names.setdefault(repr(settings), run.name)
        groups.setdefault(name, []).append(run)
    return groups


Rows = list[list[str]]
BEST = "best"
SAME = "The configurations are the same."
END = "Ends are means over the last tenth of the values; ± is the standard deviation over seeds."
END_SHARE = 0.1
LOWER_IS_BETTER = ("*/loss", "loss", "timing_s/step")
"""Metrics whose lowest value is the best; a policy's loss (`actor/pg_loss`) is not among them."""
HIGHER_IS_BETTER = (
    "val-core/*",
    "critic/score/mean",
    "critic/rewards/mean",
    "*accuracy",
    "perf/throughput",
)
"""Metrics whose highest value is the best, unless they are in `LOWER_IS_BETTER`."""


def comparison_text(runs: Sequence[ComparedRun]) -> str:
    """Return every table under its title."""

    def drawn(rows: Rows, num_titles: int = 1) -> list[str]:
        return draw_table(rows, num_titles, flush_right=True) if rows else []

    sections = {
        "Runs": draw_table(overview(runs)),
        "Settings that differ": drawn(differences(runs)) or [SAME],
        "Results": [*drawn(results(runs)), END],
        "Time per step": drawn(phases(runs)),
    }
    for names, rows in placements(runs):
        sections[f"Placement of {names}"] = drawn(rows, num_titles=len(rows[0]))
    blocks = ["\n".join([title, "-" * len(title), *ls]) for title, ls in sections.items() if ls]
    return printable("\n\n".join(blocks))


def overview(runs: Sequence[ComparedRun]) -> Rows:
    """Return steps, time and outcome of every run."""
    rows = [["run", "steps", "seconds", "outcome"]]
    for run in runs:
        steps = max((int(line["step"]) for line in run.data.metrics), default=0)
        seconds = sum(run.data.series("timing_s/step")[1])
        rows.append([run.name, str(steps), f"{seconds:.1f}", run.outcome])
    return rows


def differences(runs: Sequence[ComparedRun]) -> Rows:
    """Return the keys in which the runs differ, with each run's value; no rows if none differs."""
    keys = differing_keys(runs)
    rows = [["key", *(run.name for run in runs)]]
    for key in keys:
        rows.append([key, *(_value(run.config.get(key, ABSENT)) for run in runs)])
    return rows if keys else []


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value or "empty"
    return json.dumps(value)


def results(runs: Sequence[ComparedRun]) -> Rows:
    """Return every metric at the end and at its best; runs of several seeds share a column."""
    groups = groups_by_seed(runs)
    heading = ["metric"]
    for name, members in groups.items():
        several = f" ({len(members)} seeds)" if len(members) > 1 else ""
        heading += [f"{name}{several}", BEST]
    rows = [heading]
    for metric in metrics_shown(runs):
        row = [metric]
        for members in groups.values():
            row += [
                mean_and_deviation(values_of(members, metric)) for values_of in (ends_of, bests_of)
            ]
        rows.append(row)
    return rows


def metrics_shown(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the metrics that any run's report shows, and the time of a step."""
    names: dict[str, None] = {}
    for run in runs:
        known = metric_names(run.data.metrics)
        for panel in [*panels_of(run.data.metrics), Panel("", "", ("timing_s/step",))]:
            names |= dict.fromkeys(panel.names_among(known))
    # a KL that is always 0 compares a policy with itself
    values = {name: [v for run in runs for v in run.data.series(name)[1]] for name in names}
    return [name for name in names if name not in KL_NAMES or any(values[name])]


def ends_of(runs: Sequence[ComparedRun], metric: str) -> list[float]:
    """Return the mean of the last tenth of the metric's values, for each run that has it."""
    return [
        statistics.fmean(values[-max(1, round(END_SHARE * len(values))) :])
        for values in _finite_values(runs, metric)
    ]


def bests_of(runs: Sequence[ComparedRun], metric: str) -> list[float]:
    """Return the best value of each run that has the metric; [] if no direction is better."""
    if any(fnmatchcase(metric, pattern) for pattern in LOWER_IS_BETTER):
        return list(map(min, _finite_values(runs, metric)))
    if any(fnmatchcase(metric, pattern) for pattern in HIGHER_IS_BETTER):
        return list(map(max, _finite_values(runs, metric)))
    return []


def _finite_values(runs: Sequence[ComparedRun], metric: str) -> list[list[float]]:
    series = [list(filter(math.isfinite, run.data.series(metric)[1])) for run in runs]
    return [values for values in series if values]


def mean_and_deviation(numbers: Sequence[float]) -> str:
    """Return the mean with four digits, and for several numbers the standard deviation with two."""
    if not numbers:
        return ABSENT
    mean = f"{statistics.fmean(numbers):.4g}"
    return f"{mean} ± {statistics.stdev(numbers):.2g}" if len(numbers) > 1 else mean


def phases(runs: Sequence[ComparedRun]) -> Rows:
    """Return the seconds per step of each phase, and its fraction of the step."""
    shares: list[Mapping[str, str]] = []
    for run in runs:
        times = phase_shares(run.data.metrics, run.data.stages)
        shares.append({name: f"{spent:.3f} s, {share:.1f} %" for name, spent, share in times})
    names = dict.fromkeys(name for shares_of_run in shares for name in shares_of_run)
    rows = [["phase", *(run.name for run in runs)]]
    rows += [
        [name, *(shares_of_run.get(name, ABSENT) for shares_of_run in shares)] for name in names
    ]
    return rows if names else []


def placements(runs: Sequence[ComparedRun]) -> list[tuple[str, Rows]]:
    """Return each placement's table with the runs that have it."""
    tables: dict[str, tuple[list[str], Rows]] = {}
    for run in runs:
        placement = run.data.placement
        width = max(map(len, placement), default=0)
        rows = [[*row, *[""] * (width - len(row))] for row in placement]
        if rows:
            tables.setdefault(json.dumps(rows), ([], rows))[0].append(run.name)
    return [(", ".join(names), rows) for names, rows in tables.values()]


PAGE = "comparison.html"
TEMPLATE = Path(__file__).with_name("template.html")


def write_comparison(runs: Sequence[ComparedRun], path: Path) -> Path:
    """Write the page atomically."""
    page = page_of(TEMPLATE).render(_content(runs))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, page)
    except OSError as error:
        way_out = "Choose another file with `verl-like compare RUN RUN ... --page FILE`."
        raise ConfigError(f"{path} cannot be written ({error}). {way_out}") from error
    return path


def _content(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Return the template's values."""
    from markupsafe import Markup

    drawn = {metric: curves_of(runs, metric) for metric in metrics_shown(runs)}
    return {
        "names": [run.name for run in runs],
        "num_drawn": min(len(runs), len(COLORS)),
        "curves": {metric: Markup(svg) for metric, svg in drawn.items() if svg},
        "overview": overview(runs),
        "differences": differences(runs),
        "same": SAME,
        "results": results(runs),
        "end": END,
        "phases": phases(runs),
        "placements": placements(runs),
    }


def curves_of(runs: Sequence[ComparedRun], metric: str) -> str:
    """Return one metric of the runs on one axis, as SVG; at most one run per color is drawn."""
    lines: list[dict[str, float]] = []
    shown = [run for run in runs if run.data.series(metric)[0]][: len(COLORS)]
    for run in shown:
        for step, value in zip(*run.data.series(metric), strict=True):
            lines.append({"step": step, run.name: value})
    if not lines:
        return ""
    # the report's figure treats each run as a metric of one run
    return figures.curves(lines, Panel(metric, "", tuple(glob.escape(run.name) for run in shown)))
