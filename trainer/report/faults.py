"""The faults of a run that was tried on purpose, from its `chaos.jsonl` (`trainer.chaos`)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from verl_like.files import json_objects

CHAOS_FILE = "chaos.jsonl"
LEDGER = "ledger"
"""The kind of the last line, which is no fault."""
FATES = ("kept", "made_again", "not_finished")
"""What may become of a step that was begun."""


def faults_in_words(folder: Path) -> list[str]:
    """A line about the faults by kind, and about the ledger; none without faults."""
    if not (folder / CHAOS_FILE).is_file():
        return []
    lines, _ = json_objects(folder / CHAOS_FILE)
    kinds = Counter(line["kind"] for line in lines if line["kind"] != LEDGER)
    faults = ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "none"
    ledgers = [_ledger_in_words(line) for line in lines if line["kind"] == LEDGER]
    return ["; ".join([f"faults on purpose: {faults}", *ledgers[-1:]])]


def _ledger_in_words(line: dict[str, Any]) -> str:
    became = [f"{line[name]} {name.replace('_', ' ')}" for name in FATES]
    words = f"steps: {line['begun']} begun = {' + '.join(became)}"
    return f"{words}; {_samples_in_words(line['samples'])}" if "samples" in line else words


def _samples_in_words(samples: dict[str, Any]) -> str:
    dropped = samples["dropped"]
    reasons = "".join(f" ({reason}: {count})" for reason, count in dropped.items())
    return (
        f"samples: {samples['made']} made = {samples['trained']} trained + "
        f"{sum(dropped.values())} dropped{reasons}"
    )
