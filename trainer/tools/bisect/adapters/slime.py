"""Read what slime's `--save-debug-rollout-data DIR/{rollout_id}.pt` wrote, without pickle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from verl_like.record import ragged


def slime_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a rollout; only tensors, numbers and other plain values are read."""
    import torch

    with torch.serialization.safe_globals(OF_NUMBERS):
        samples = torch.load(path, map_location="cpu", weights_only=True)["samples"]

    def column(key: str, kinds: Any = object) -> list[Any] | None:
        values = [sample.get(key) for sample in samples]
        return values if all(x is not None and isinstance(x, kinds) for x in values) else None

    tokens, lengths = column("tokens") or [], column("response_length", int) or []
    begins = [len(row) - n for row, n in zip(tokens, lengths, strict=True)]
    return ragged(
        [row[:n] for row, n in zip(tokens, begins, strict=True)],
        [row[n:] for row, n in zip(tokens, begins, strict=True)],
        scores=column("reward", NUMBERS),
        group=column("group_index", NUMBERS),
        truncated=[sample.get("status") == "truncated" for sample in samples],
        response_mask=column("loss_mask"),
        rollout_log_probs=column("rollout_log_probs"),
    )


NUMBERS = (int, float, np.number)
OF_NUMBERS: list[Any] = [np.dtype, np.float64(0).__reduce__()[0]]
OF_NUMBERS += [type(np.dtype(kind)) for kind in (np.float64, np.float32, np.int64)]
"""The parts of a pickled number of numpy."""
