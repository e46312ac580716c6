"""Compare a replay with the run, bit for bit: metrics of a step, and batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_like.batch.protocol import DataProto

OF_THE_CLOCK = ("timing", "perf/")
"""Prefixes of metrics about seconds, speed and memory of the machine."""
SECONDS = "_s/mean"
"""The suffix of metrics about seconds of trajectories."""
TIMES = ("times", "engine_s", "environment_s", "waiting_s")
"""The facts of a trajectory about seconds."""


def counted(names: Collection[str]) -> list[str]:
    """Return the metrics to compare."""
    return sorted(n for n in names if not n.startswith(OF_THE_CLOCK) and not n.endswith(SECONDS))


def differing_metrics(
    was: Mapping[str, float], now: Mapping[str, float], names: Collection[str]
) -> list[str]:
    """Return a line for every metric of these names that differs."""
    lines = []
    for name in names:
        before, after = (repr(float(x[name])) if name in x else "absent" for x in (was, now))
        if before != after:
            lines.append(f"{name} was {before}, is {after}")
    return lines


def differing_columns(was: Path, now: Path) -> list[str]:
    """Return a line for every column that differs between two saved batches."""
    before, after = (_columns(DataProto.load_from_disk(path)) for path in (was, now))
    lines = []
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            lines.append(f"{name} is new" if name in after else f"{name} is absent")
        elif difference := _difference(before[name], after[name]):
            lines.append(f"{name} {difference}")
    return lines


def _columns(batch: DataProto) -> dict[str, Any]:
    tensors = {name: batch.padded(name) for name in batch.columns}
    return {**tensors, **batch.non_tensor_batch}


def _difference(before: Any, after: Any) -> str:
    if before.shape != after.shape or before.dtype != after.dtype:
        return (
            f"was {tuple(before.shape)} of {before.dtype}, is {tuple(after.shape)} of {after.dtype}"
        )
    pairs = enumerate(zip(before, after, strict=True))
    rows = [number for number, (first, second) in pairs if _bits(first) != _bits(second)]
    return f"differs in {len(rows)} of {len(before)} rows, first in row {rows[0]}" if rows else ""


def _bits(row: Any) -> Any:
    """Return the content of a row, in which NaN equals itself and 0.0 differs from -0.0."""
    if isinstance(row, torch.Tensor):
        return row.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    if isinstance(row, np.ndarray | np.generic) and row.dtype != np.dtype(object):
        return row.tobytes()
    if isinstance(row, dict):
        return repr({name: row[name] for name in row if name not in TIMES})
    return repr(row)
