"""Injected faults (`trainer.roadside.fault_injection`) and restarts of a run, in words."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from verl_like.files import json_objects

FAULTS_FILE, RESTARTS_FILE = "faults.jsonl", "restarts.jsonl"
LEDGER = "ledger"
"""The kind of the last line, which is not a fault."""
OUTCOMES = ("kept", "made_again", "not_finished")
"""The possible outcomes of a step that has begun."""


def faults_in_words(folder: Path) -> list[str]:
    """Describe the faults by kind, and the ledger, in one line; none without faults."""
    if not (folder / FAULTS_FILE).is_file():
        return []
    lines, _ = json_objects(folder / FAULTS_FILE)
    kinds = Counter[str]()
    for line in lines:
        if line["kind"] != LEDGER:
            kinds[line["kind"]] += line.get("count", 1)
    faults = ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "none"
    ledgers = [_ledger_in_words(line) for line in lines if line["kind"] == LEDGER]
    return ["; ".join([f"faults on purpose: {faults}", *ledgers[-1:]])]


def _ledger_in_words(line: dict[str, Any]) -> str:
    became = [f"{line[name]} {name.replace('_', ' ')}" for name in OUTCOMES]
    words = f"steps: {line['begun']} begun = {' + '.join(became)}"
    return f"{words}; {_samples_in_words(line['samples'])}" if "samples" in line else words


def _samples_in_words(samples: dict[str, Any]) -> str:
    dropped = samples["dropped"]
    reasons = "".join(f" ({reason}: {count})" for reason, count in dropped.items())
    return (
        f"samples: {samples['made']} made = {samples['trained']} trained + "
        f"{sum(dropped.values())} dropped{reasons}"
    )


def restarts_in_words(folder: Path) -> list[str]:
    """Describe the restarts, and the samples that lost groups were making, in one line, if any."""
    lines, _ = json_objects(folder / RESTARTS_FILE)
    steps = [str(line.get("step")) for line in lines if "lost" in line]
    if not steps:
        return []
    sources = ""
    for line in lines:
        if "state_from" in line:
            lost = lost_in_words(line["finished_steps_made_again"])
            sources += f"; in step {line['step']} with the state of {line['state_from']}, {lost}"
    num_kept = sum(line["samples_kept"] for line in lines if "samples_kept" in line)
    again = sum(line["samples_made_again"] for line in lines if "samples_made_again" in line)
    samples = ""
    if num_kept + again:
        samples = (
            f"; of the samples that lost groups were making {num_kept} kept, {again} made again"
        )
    return [f"restarts: {len(steps)}, in step {', '.join(steps)}{sources}{samples}"]


def lost_in_words(num_steps: int) -> str:
    """Describe how many finished steps a restart has lost."""
    if num_steps == 0:
        return "no finished step is lost"
    return f"{num_steps} finished step{'s' * (num_steps > 1)} made again"
