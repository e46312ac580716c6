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
ABSENT = "absent"


def differing_metrics(
    was: Mapping[str, float], now: Mapping[str, float], names: Collection[str] | None = None
) -> list[str]:
    """A line for every number that is not the same; `names` alone, where a stage has no others."""
    lines = []
    for name in sorted(counted(was.keys() | now.keys() if names is None else names)):
        before, after = (repr(float(each[name])) if name in each else ABSENT for each in (was, now))
        if before != after:
            lines.append(f"{name} was {before}, is {after}")
    return lines


def counted(names: Collection[str]) -> list[str]:
    """The metrics that are compared."""
    return [name for name in names if not name.startswith(OF_THE_CLOCK)]


def differing_columns(was: Path, now: Path) -> list[str]:
    """A line for every column of two kept batches that is not the same."""
    before, after = (_columns(DataProto.load_from_disk(path)) for path in (was, now))
    lines = []
    for name in sorted(before.keys() | after.keys()):
        if name not in before or name not in after:
            lines.append(f"{name} is new" if name in after else f"{name} is absent")
        elif not _is_same(before[name], after[name]):
            lines.append(f"{name} {_how_much(before[name], after[name])}")
    return lines


def _columns(batch: DataProto) -> dict[str, Any]:
    tensors = {name: batch.padded(name) for name in batch.columns}
    return {**tensors, **batch.non_tensor_batch}


def _is_same(before: Any, after: Any) -> bool:
    """Bit for bit: a NaN is itself, 0.0 is not -0.0."""
    if type(before) is not type(after) or before.dtype != after.dtype:
        return False
    if before.shape != after.shape:
        return False
    if isinstance(before, torch.Tensor):
        first, second = (each.contiguous().view(torch.uint8) for each in (before, after))
        return torch.equal(first, second)
    if before.dtype == np.dtype(object):
        return repr(before.tolist()) == repr(after.tolist())
    return bool(before.tobytes() == after.tobytes())


def _how_much(before: Any, after: Any) -> str:
    """Rows that differ, where rows can be compared."""
    if before.shape != after.shape or before.dtype != after.dtype:
        return (
            f"was {tuple(before.shape)} of {before.dtype}, is {tuple(after.shape)} of {after.dtype}"
        )
    rows = [row for row in range(len(before)) if not _row_is_same(before, after, row)]
    return f"differs in {len(rows)} of {len(before)} rows, first in row {rows[0]}"


def _row_is_same(before: Any, after: Any, row: int) -> bool:
    return _is_same(before[row : row + 1], after[row : row + 1])
