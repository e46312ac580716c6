"""The generators and trainers of an asynchronous run, for the report.

Their seconds are in the steps of `metrics.jsonl`. The account of the samples is in `async.json`,
which is written at the end of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.report.tokens import tokens_in_words
from verl_like.files import parse_json
from verl_like.terminal import draw_table

STATES = ("busy", "waiting", "syncing")
ACCOUNT = ("made", "trained", "queued", "dropped", "in_flight")
"""The columns of the account of a generator's samples."""
MOST_GENERATORS = 16
"""The most rows for generators."""
PREFIX = "async/"
Metrics = Sequence[Mapping[str, float]]


@dataclass(frozen=True)
class AsyncRun:
    """The report's data about generators and trainers."""

    seconds: Mapping[str, Mapping[str, float]]
    """Role -> state -> seconds of all steps."""
    ledger: Sequence[Sequence[str]] = ()
    """Table cells: a heading, then a row for each generator."""


def read_async(folder: Path, metrics: Metrics, notes: list[str]) -> AsyncRun | None:
    """Return the generators and trainers of a run; None if it has none."""
    seconds = seconds_by_role(metrics)
    path, table = folder / "async.json", list[list[str]]()
    if path.is_file():
        try:
            table = ledger_table(parse_json(path.read_bytes())["ledger"]["generators"])
        except (ValueError, KeyError, TypeError, AttributeError):
            notes.append(f"{path.name} is half written, or not a run's, and left out.")
    return AsyncRun(seconds, table) if seconds or table else None


def seconds_by_role(metrics: Metrics) -> dict[str, dict[str, float]]:
    """Return the sums of `async/<role>/<state>_s`."""
    by_role: dict[str, dict[str, float]] = {}
    for line in metrics:
        for name, value in line.items():
            role, _, state = name.removeprefix(PREFIX).partition("/")
            state = state.removesuffix("_s")
            if name.startswith(PREFIX) and state in STATES:
                seconds = by_role.setdefault(role.replace("_", " "), dict.fromkeys(STATES, 0.0))
                seconds[state] += value
    return by_role


def ledger_table(generators: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return a heading, a row for each generator, and a total row if there are several.

    If there are very many generators, most of them share a row.
    """
    accounts = {
        f"generator {generator}": Counter({**account, "dropped": sum(account["dropped"].values())})
        for generator, account in generators.items()
    }
    rows, total = dict(accounts), sum(accounts.values(), Counter[str]())
    if len(rows) > MOST_GENERATORS:
        first = list(accounts)[: MOST_GENERATORS - 1]
        rows = {generator: accounts[generator] for generator in first}
        rows[f"{len(accounts) - len(first)} others"] = total - sum(rows.values(), Counter[str]())
    if len(rows) > 1:
        rows["all"] = total
    table = [[who, *(str(counts[name]) for name in ACCOUNT)] for who, counts in rows.items()]
    return [["samples", *(name.replace("_", " ") for name in ACCOUNT)], *table] if rows else []


def describe_log(log: Mapping[str, Any]) -> str:
    """Describe the sample log: a row per generator, reasons for drops, and token counts."""
    rows, reasons = log["generators"], Counter[str]()
    for row in rows.values():
        reasons.update(row["dropped"])
    lines = draw_table(ledger_table(rows), flush_right=True) if rows else []
    lines += [f"  dropped: {count} ({reason})" for reason, count in reasons.items()]
    return "\n".join([*lines, f"  tokens: {tokens_in_words(**log['tokens'])}"])
