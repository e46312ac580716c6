"""Whether what was made again is what the run had, bit for bit: numbers of a step, and batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_like.batch.protocol import DataProto

OF_THE_CLOCK = ("timing", "perf/")
"""Metrics that begin so tell seconds, speed and memory of the machine."""
SECONDS = "_s/mean"
"""So do those that end so, of trajectories."""
TIMES = ("times", "engine_s", "environment_s", "waiting_s")
"""What a trajectory's facts say of the clock."""


def counted(names: Collection[str]) -> list[str]:
    """The metrics that are compared."""
    return sorted(n for n in names if not n.startswith(OF_THE_CLOCK) and not n.endswith(SECONDS))


def differing_metrics(
    was: Mapping[str, float], now: Mapping[str, float], names: Collection[str]
) -> list[str]:
    """A line for every number of these names that is not the same."""
    lines = []
    for name in names:
        before, after = (repr(float(x[name])) if name in x else "absent" for x in (was, now))
        if before != after:
            lines.append(f"{name} was {before}, is {after}")
    return lines


def differing_columns(was: Path, now: Path) -> list[str]:
    """A line for every column of two kept batches that is not the same."""
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
    """What a row holds, so that a NaN is itself, and 0.0 is not -0.0."""
    if isinstance(row, torch.Tensor):
        return row.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    if isinstance(row, np.ndarray | np.generic) and row.dtype != np.dtype(object):
        return row.tobytes()
    if isinstance(row, dict):
        return repr({name: row[name] for name in row if name not in TIMES})
    return repr(row)
