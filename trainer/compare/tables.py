"""The tables of a comparison, as rows of text: a heading, then a row for each thing compared.

The terminal and the page show the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.compare.results import best_of, end_of, metrics_shown
from trainer.compare.runs import ABSENT, ComparedRun, differing_keys, groups_by_seed
from trainer.report.read import phase_shares

Rows = list[list[str]]
BEST = "best"


def overview(runs: Sequence[ComparedRun]) -> Rows:
    """Steps, time and end of every run."""
    rows = [["run", "steps", "seconds", "outcome"]]
    for run in runs:
        steps = max((int(line["step"]) for line in run.data.metrics), default=0)
        rows.append([run.name, str(steps), f"{run.seconds:.1f}", run.outcome])
    return rows


def differences(runs: Sequence[ComparedRun]) -> Rows:
    """The keys in which the runs differ, with the value of each run; no rows where none does."""
    keys = differing_keys(runs)
    if not keys:
        return []
    rows = [["key", *(run.name for run in runs)]]
    for key in keys:
        rows.append([key, *(_value(run.config.get(key, ABSENT)) for run in runs)])
    return rows


def results(runs: Sequence[ComparedRun]) -> Rows:
    """Every metric at the end and at its best; runs of several seeds share a column."""
    groups = groups_by_seed(runs)
    heading = ["metric"]
    for name, members in groups.items():
        several = f" ({len(members)} seeds)" if len(members) > 1 else ""
        heading += [f"{name}{several}", BEST]

    rows = [heading]
    for metric in metrics_shown(runs):
        row = [metric]
        for members in groups.values():
            end, best = end_of(members, metric), best_of(members, metric)
            row += [ABSENT if end is None else str(end), ABSENT if best is None else str(best)]
        rows.append(row)
    return rows


def phases(runs: Sequence[ComparedRun]) -> Rows:
    """Seconds a step that each phase took, and its share."""
    shares: list[Mapping[str, tuple[float, float]]] = []
    for run in runs:
        found = phase_shares(run.data.metrics, run.data.stages)
        shares.append({name: (seconds, share) for name, seconds, share in found})

    names = dict.fromkeys(name for found in shares for name in found)
    if not names:
        return []
    rows = [["phase", *(run.name for run in runs)]]
    for name in names:
        cells = [found.get(name) for found in shares]
        rows.append(
            [name, *(f"{c[0]:.3f} s, {c[1]:.1f} %" if c is not None else ABSENT for c in cells)]
        )
    return rows


def placements(runs: Sequence[ComparedRun]) -> list[tuple[str, Rows]]:
    """(the runs that have it, its table) for each placement that any of them has."""
    found: dict[str, tuple[list[str], Rows]] = {}
    for run in runs:
        rows = [list(row) for row in run.data.placement]
        if rows:
            found.setdefault(json.dumps(rows), ([], rows))[0].append(run.name)
    return [(", ".join(names), rows) for names, rows in found.values()]


def _value(value: Any) -> str:
    if isinstance(value, str):
        return value or "empty"
    return json.dumps(value)
