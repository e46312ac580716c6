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


class Interval(NamedTuple):
    """A stretch of one role in one state, in seconds since the run's first step."""

    start: float
    end: float
    state: str
    what: str


@dataclass(frozen=True)
class DetachedRun:
    """What the report shows of makers and trainers."""

    seconds: Mapping[str, Mapping[str, float]]
    """Role -> state -> seconds."""
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
    """The makers and trainers of a run; None if it has none. What is not ours is left out."""
    path = folder / "detached.json"
    facts: Any = {}
    if path.is_file():
        try:
            facts = parse_json(path.read_bytes())
        except ValueError:
            notes.append(f"{path.name} is half written and left out.")
    if not facts and not any(name.startswith(PREFIX) for line in metrics for name in line):
        return None

    ledger = _mapping(_mapping(facts).get("ledger"))
    return DetachedRun(
        seconds=_seconds(_mapping(facts).get("activity")) or _seconds_of_steps(metrics),
        intervals=_intervals(_mapping(facts).get("intervals")),
        staleness=_counts(ledger.get("staleness")) or _staleness_of_steps(metrics),
        versions=_counts(ledger.get("versions")),
        books=_books(_mapping(ledger.get("makers"))),
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
    found: Counter[int] = Counter()
    for line in metrics:
        for name, value in line.items():
            versions = name.removeprefix(f"{PREFIX}staleness/")
            if name.startswith(PREFIX) and versions.isdecimal():
                found[int(versions)] += round(value)
    return dict(sorted(found.items()))


def _seconds(value: Any) -> dict[str, dict[str, float]]:
    found = {}
    for role, states in _mapping(value).items():
        seconds = {state: _number(_mapping(states).get(state)) for state in STATES}
        if sum(seconds.values()) > 0:
            found[role] = seconds
    return found


def _intervals(value: Any) -> dict[str, list[Interval]]:
    found = {}
    for role, rows in _mapping(value).items():
        intervals = []
        for row in rows if isinstance(rows, list) else []:
            if isinstance(row, list) and len(row) == len(Interval._fields) and row[2] in STATES:
                intervals.append(Interval(_number(row[0]), _number(row[1]), row[2], str(row[3])))
        if intervals:
            found[role] = intervals
    return found


def _counts(value: Any) -> dict[int, int]:
    """Numbers as keys and values, in the order of the keys."""
    found = {}
    for name, count in _mapping(value).items():
        if name.isdecimal() and _number(count) > 0:
            found[int(name)] = round(_number(count))
    return dict(sorted(found.items()))


def _books(makers: Mapping[str, Any]) -> list[list[str]]:
    """A row a maker, and one for all."""
    rows = []
    total: Counter[str] = Counter()
    for maker, account in makers.items():
        counts = dict(_mapping(account))
        counts["dropped"] = sum(map(_number, _mapping(counts.get("dropped")).values()))
        numbers = {name: round(_number(counts.get(name))) for name in ACCOUNT}
        total.update(numbers)
        rows.append([f"maker {maker}", *(str(numbers[name]) for name in ACCOUNT)])
    if not rows:
        return []
    if len(rows) > 1:
        rows.append(["all", *(str(total[name]) for name in ACCOUNT)])
    return [["samples", *(name.replace("_", " ") for name in ACCOUNT)], *rows]


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float:
    """A finite number that is not below 0; 0 for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < float("inf") else 0.0
