"""What a detached run's folder says of its makers and trainers, for the report.

The numbers of steps are in `metrics.jsonl`; `detached.json`, which the run's end writes, has what
every role did, and the books of the samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from verl_like.files import parse_json

STATES = ("busy", "waiting", "syncing")
ACCOUNT = ("made", "trained", "queued", "dropped", "in_flight")
"""Columns of the books: what became of a maker's samples."""
PREFIX = "detached/"
Seconds = Mapping[str, Mapping[str, float]]
"""Role -> state -> seconds."""


class Interval(NamedTuple):
    """A stretch of one role in one state, in seconds since the run's first step."""

    start: float
    end: float
    state: str
    what: str


@dataclass(frozen=True)
class DetachedRun:
    """What the report shows of makers and trainers."""

    seconds: Seconds
    intervals: Mapping[str, Sequence[Interval]] = field(default_factory=dict)
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Versions between draw and update -> trained samples."""
    versions: Mapping[int, int] = field(default_factory=dict)
    """Version of the weights -> trained samples that it made."""
    books: Sequence[Sequence[str]] = ()
    """Cells: a heading, then a row for each maker."""


def read_detached(
    folder: Path, metrics: Sequence[Mapping[str, float]], notes: list[str]
) -> DetachedRun | None:
    """The makers and trainers of a run; None if it has none."""
    of_steps = DetachedRun(_seconds_of_steps(metrics), staleness=_staleness_of_steps(metrics))
    path = folder / "detached.json"
    if path.is_file():
        try:
            return _of_whole_run(parse_json(path.read_bytes()), of_steps)
        except (ValueError, KeyError, TypeError, AttributeError):
            notes.append(f"{path.name} is half written, or not a run's, and left out.")
    has_any = any(name.startswith(PREFIX) for line in metrics for name in line)
    return of_steps if has_any else None


def _of_whole_run(facts: Any, of_steps: DetachedRun) -> DetachedRun:
    ledger = facts.get("ledger", {})
    seconds = {
        role: {state: float(states[state]) for state in STATES}
        for role, states in facts.get("activity", {}).items()
    }
    intervals = {
        role: [Interval(*row) for row in rows]
        for role, rows in facts.get("intervals", {}).items()
        if rows
    }
    return DetachedRun(
        seconds={role: spent for role, spent in seconds.items() if sum(spent.values()) > 0}
        or of_steps.seconds,
        intervals=intervals,
        staleness=_by_number(ledger.get("staleness", {})) or of_steps.staleness,
        versions=_by_number(ledger.get("versions", {})),
        books=_books(ledger.get("makers", {})),
    )


def speeds(metrics: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """For each step the tokens a second of makers and trainers, while busy.

    Makers' are those of all responses that the step took, of what it left out as well.
    """
    found = []
    for line in metrics:
        tokens = line.get("perf/total_num_tokens", 0.0)
        drawn = line.get("detached/drawn_tokens", 0.0)
        spent = {"makers": 0.0, "trainer": 0.0}
        for role, seconds in _seconds_of_steps([line]).items():
            spent["makers" if role.startswith("maker") else "trainer"] += seconds["busy"]
        if not (tokens and spent["makers"] > 0 and spent["trainer"] > 0):
            continue
        found.append(
            {
                "step": line["step"],
                "a maker": drawn / spent["makers"],
                "the trainer": tokens / spent["trainer"],
            }
        )
    return found


def _seconds_of_steps(metrics: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The sums of `detached/<role>/<state>_s`, of a run that has not ended."""
    found: dict[str, dict[str, float]] = {}
    for line in metrics:
        for name, value in line.items():
            role, _, state = name.removeprefix(PREFIX).partition("/")
            state = state.removesuffix("_s")
            if name.startswith(PREFIX) and state in STATES:
                seconds = found.setdefault(role.replace("_", " "), dict.fromkeys(STATES, 0.0))
                seconds[state] += value
    return found


def _staleness_of_steps(metrics: Sequence[Mapping[str, float]]) -> dict[int, int]:
    """The sums of `detached/staleness/<versions>`."""
    found: Counter[str] = Counter()
    for line in metrics:
        for name, value in line.items():
            if name.startswith(f"{PREFIX}staleness/"):
                found[name.removeprefix(f"{PREFIX}staleness/")] += round(value)
    return _by_number({name: count for name, count in found.items() if name.isdecimal()})


def _by_number(counts: Mapping[str, int]) -> dict[int, int]:
    numbered = {int(name): count for name, count in counts.items() if count > 0}
    return dict(sorted(numbered.items()))


def _books(makers: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """A row a maker, and one for all."""
    rows = []
    total: Counter[str] = Counter()
    for maker, account in makers.items():
        counts = {**account, "dropped": sum(account["dropped"].values())}
        total.update({name: counts[name] for name in ACCOUNT})
        rows.append([f"maker {maker}", *(str(counts[name]) for name in ACCOUNT)])
    if len(rows) > 1:
        rows.append(["all", *(str(total[name]) for name in ACCOUNT)])
    heading = ["samples", *(name.replace("_", " ") for name in ACCOUNT)]
    return [heading, *rows] if rows else []
