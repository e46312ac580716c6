"""What is kept of a part of `gpu.sh`: figures from the files that it has written itself.

Each function has the part's folder and the card's data sheet, if the card is known.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from gpu_models import decoded_bytes

if TYPE_CHECKING:
    from gpu_parts import Run

    from trainer.planner.devices import Device

Figures = Mapping[str, float | str]


def none(folder: Path, card: Device | None) -> Figures:
    """Its exit code says all."""
    return {}


def written(folder: Path, card: Device | None) -> Figures:
    """What the part has written as JSON."""
    found: Figures = json.loads((folder / "figures.json").read_text("utf-8"))
    return found


def of_tests(folder: Path, card: Device | None) -> Figures:
    """By pytest's own report."""
    suite = ElementTree.parse(folder / "tests.xml").getroot().find("testsuite")
    assert suite is not None, "pytest writes one suite"
    tests, *others = (
        int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")
    )
    failures, errors, skipped = others
    return {"passed": tests - sum(others), "failed": failures + errors, "skipped": skipped}


def of_doctor(folder: Path, card: Device | None) -> Figures:
    """What it finds wrong."""
    lines = (folder / "log.txt").read_text("utf-8", errors="replace").splitlines()
    failed = [re.split(r" {2,}", line)[1] for line in lines if line.startswith("FAIL  ")]
    fine = sum(line.startswith("ok    ") for line in lines)
    return {"ok": fine, "failing": ", ".join(failed) or "nothing"}


METRICS = {
    "s a step": "timing_s/step",
    "update s": "timing_s/update_actor",
    "critic's update s": "timing_s/update_critic",
    "tokens/s a card": "perf/throughput",
    "MFU": "perf/mfu/actor",
    "critic's MFU": "perf/mfu/critic",
    "peak GiB": "perf/max_memory_allocated_gb",
}
"""Figure -> its metric."""
IN_TURNS = {
    "generation s": "timing_s/gen",
    "sync s": "timing_s/update_weights",
    "sync MB": "perf/weight_sync_mb",
}
BESIDE = {
    "wait for samples s": "timing_s/gen",
    "sync s": "timing_s/deliver_weights",
    "sync MB": "perf/published_mb",
}
"""Those that makers beside the trainers have in their place."""


def of_run(run: Run, folder: Path, card: Device | None) -> Figures:
    """Medians over the steps of `metrics.jsonl` but the first one, and shares of the card's rates.

    Decoding counts what must be read of memory over all that generating took, sync what must be
    sent over all that it took.
    """
    text = (folder / "run" / "metrics.jsonl").read_text("utf-8")
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()][1:]
    found: dict[str, float | str] = {}
    more = BESIDE if run.recipe == "detached" else IN_TURNS
    for name, metric in (METRICS | more).items():
        if values := [line[metric] for line in lines if metric in line]:
            found[name] = statistics.median(values)
    if not lines:
        raise ValueError("the run has no step after its first one")
    if card is None:
        return found
    if seconds := found.get("generation s"):
        read = decoded_bytes(run.model, run.rows_of_engine, run.prompt * 3 // 4, run.response)
        found["of bandwidth"] = read / run.engine_cards / float(seconds) / card.memory
    if (sent := found.get("sync MB")) and (seconds := found.get("sync s")):
        found["sync over link"] = float(seconds) * card.link / (float(sent) * 2**20)
    return found
