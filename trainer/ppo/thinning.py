"""`rollouts/`, `validation/` of a long run: the newest steps' samples whole, of older ones a few.

A step's samples are thinned when it is no longer among the newest, those of a validation when its
step is not.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from verl_like.files import write_whole

BYTES_OF_OLD_STEP = 2048
"""What stays of a step's samples at most; one sample stays, however long."""


def thin_samples(path: Path, limit: int = BYTES_OF_OLD_STEP) -> None:
    """Leave the best, the worst, and others spread between them, as many as there is room for."""
    if not path.is_file() or path.stat().st_size <= limit:
        return
    lines = path.read_bytes().splitlines(keepends=True)
    by_score = sorted(range(len(lines)), key=lambda row: _score(lines[row]))
    kept: list[int] = []
    room = limit
    for row in _extremes_first(by_score):
        if not kept or len(lines[row]) <= room:
            kept.append(row)
            room -= len(lines[row])
    write_whole(path, b"".join(lines[row] for row in sorted(kept)), to_disk=False)


def steps_up_to(folder: Path, last: int) -> list[int]:
    """The steps up to `last` of which the folder has samples: not every step has a validation."""
    found = [int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdecimal()]
    return [step for step in found if step <= last]


def _extremes_first(ordered: Sequence[int]) -> list[int]:
    """Last, first, then the middle of the gaps between, the widest gap first."""
    order, gaps = [ordered[-1]], [(0, len(ordered) - 1)]
    if len(ordered) > 1:
        order.append(ordered[0])
    for low, high in gaps:  # grows while it is read
        middle = (low + high) // 2
        if middle not in (low, high):
            order.append(ordered[middle])
            gaps += [(low, middle), (middle, high)]
    return order


def _score(line: bytes) -> float:
    score = json.loads(line).get("score")
    return float(score) if isinstance(score, int | float) else 0.0
