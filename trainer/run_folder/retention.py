"""Which committed checkpoints stay in the run folder: the newest ones, and the best.

They are sorted out after each commit. The best is that of the step with the best validation: the
mean of `val-core/…`, or, where a recipe validates by losses alone, the lowest.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.run_folder.marker import committed
from verl_like.files import parse_json


def drop_old(folder: Path, keep: int | None) -> None:
    """Delete those of the run folder's checkpoints that do not stay."""
    for step in steps_to_drop(folder, committed(folder), keep):
        checkpoint = folder / f"global_step_{step}"
        old = checkpoint.with_name(checkpoint.name + ".old")
        checkpoint.replace(old)  # half a folder must never carry the name of a whole one
        shutil.rmtree(old, ignore_errors=True)


def steps_to_drop(folder: Path, steps: Sequence[int], keep: int | None) -> list[int]:
    """Those of the committed steps, oldest first, whose checkpoints are neither new nor best."""
    if keep is None:
        return []
    best = _best(folder / "metrics.jsonl", steps)
    return [step for step in steps[:-keep] if step != best]


def _best(metrics: Path, steps: Sequence[int]) -> int | None:
    """The step with the best validation; the later of equals; None where none was validated."""
    best, highest = None, -math.inf
    for line in _validated_lines(metrics):
        score = validation_score(line)
        if line.get("step") in steps and score is not None and score >= highest:
            best, highest = line["step"], score
    return best


def validation_score(line: Mapping[str, Any]) -> float | None:
    """One number for the validation in a line of metrics, larger for a better one."""
    scores, losses = [], []
    for name, value in line.items():
        if not isinstance(value, int | float):
            continue
        if name.startswith("val") and name.endswith("loss"):
            losses.append(value)
        elif name.startswith("val-core/"):
            scores.append(value)
    if scores:
        return _mean(scores)
    return -_mean(losses) if losses else None


def _mean(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return mean if math.isfinite(mean) else -math.inf


def _validated_lines(metrics: Path) -> list[dict[str, Any]]:
    """The lines with a validation; a long run has many others, which are not parsed."""
    if not metrics.is_file():
        return []
    found = []
    with metrics.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if '"val' in line:
                with suppress(ValueError):  # half a line, of a killed run
                    found.append(parse_json(line))
    return [line for line in found if isinstance(line, dict)]
