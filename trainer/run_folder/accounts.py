"""Summaries of a run from its folder: tokens and generators.

The seconds of an asynchronous run are in the steps of `metrics.jsonl`. Its sample counts are in
`async.json`, which is written at the end of the run. A sampled token is trained on, queued, or
excluded for a reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.run_folder.metrics import LEFT_OUT, TRAINED, MetricLines
from verl_like.files import parse_json
from verl_like.terminal import draw_table


def tokens_of(lines: Iterable[Mapping[str, float]]) -> tuple[int, Counter[str]]:
    """Return the number of tokens that these steps trained on, and left out, by reason."""
    trained, left_out = 0, Counter[str]()
    for line in lines:
        trained += int(line.get(TRAINED, 0))
        for name, num in line.items():
            if name.startswith(LEFT_OUT):
                left_out[name.removeprefix(LEFT_OUT)] += int(num)
    return trained, left_out


def describe_tokens(
    sampled: int, trained: int, left_out: Mapping[str, int], queued: int = 0
) -> str:
    """Describe the tokens of a run in one line."""
    total = sum(left_out.values())
    reasons = "; ".join(f"{reason}: {num:,}" for reason, num in left_out.items())
    parts = [f"{trained:,} trained", *([f"{queued:,} queued"] if queued else [])]
    parts.append(f"{total:,} excluded" + (f" ({reasons})" if reasons else ""))
    sign = "=" if sampled == trained + queued + total else "≠"
    return f"{sampled:,} sampled {sign} {' + '.join(parts)}"


STATES = ("busy", "waiting", "syncing")
ACCOUNT = {
    "made": "generated",
    "trained": "trained",
    "queued": "queued",
    "dropped": "dropped",
    "in_flight": "in flight",
}
"""Fields of a generator's sample counts -> their headings in the table."""
MAX_GENERATORS = 16
"""The most rows for generators."""
PREFIX = "async/"


def read_ledger(folder: Path, notes: list[str]) -> list[list[str]]:
    """Return the table of a run's generators from its `async.json`; [] if it has none."""
    path = folder / "async.json"
    if path.is_file():
        try:
            return ledger_table(parse_json(path.read_bytes())["ledger"]["generators"])
        except (ValueError, KeyError, TypeError, AttributeError):
            notes.append(f"{path.name} is incomplete, or not written by a run, and is left out.")
    return []


def seconds_by_role(metrics: MetricLines) -> dict[str, dict[str, float]]:
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

    If there are more than `MAX_GENERATORS`, the last ones share a row.
    """
    accounts = {
        f"generator {generator}": Counter({**account, "dropped": sum(account["dropped"].values())})
        for generator, account in generators.items()
    }
    rows, total = dict(accounts), sum(accounts.values(), Counter[str]())
    if len(rows) > MAX_GENERATORS:
        first = list(accounts)[: MAX_GENERATORS - 1]
        rows = {generator: accounts[generator] for generator in first}
        rows[f"{len(accounts) - len(first)} others"] = total - sum(rows.values(), Counter[str]())
    if len(rows) > 1:
        rows["all"] = total
    table = [[who, *(str(counts[name]) for name in ACCOUNT)] for who, counts in rows.items()]
    return [["samples", *ACCOUNT.values()], *table] if rows else []


def describe_log(log: Mapping[str, Any]) -> str:
    """Describe the sample log: a row per generator, reasons for drops, and token counts."""
    rows, reasons = log["generators"], Counter[str]()
    for row in rows.values():
        reasons.update(row["dropped"])
    lines = draw_table(ledger_table(rows), flush_right=True) if rows else []
    lines += [f"  dropped: {count} ({reason})" for reason, count in reasons.items()]
    return "\n".join([*lines, f"  tokens: {describe_tokens(**log['tokens'])}"])
