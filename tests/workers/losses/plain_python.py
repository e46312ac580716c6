"""Token losses and their aggregation in plain Python, for comparison."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from workers.config import ActorConfig

Columns = dict[str, Tensor]
Rows = list[list[float]]
"""Of every row, one number for each of its tokens."""

ROWS, WIDTH = 6, 5
CONFIG = ActorConfig(clip_ratio=0.2, clip_ratio_high=0.3, clip_ratio_c=1.5)


def aggregate(rows_of_tokens: Rows, mode: str, scale: float = WIDTH) -> float:
    """Compute `agg_loss` in plain Python, from each row's list of token losses."""
    rows = [tokens for tokens in rows_of_tokens if tokens]
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode == "token-sum":
        return sum(map(sum, rows))
    if mode == "seq-mean-token-mean":
        return sum(sum(tokens) / len(tokens) for tokens in rows) / len(rows)
    return sum(map(sum, rows)) / len(rows) / (scale if mode.endswith("norm") else 1)


def tokens_of(column: Tensor, mask: Tensor) -> Rows:
    return [row[inside.bool()].tolist() for row, inside in zip(column, mask, strict=True)]


def denominators(mask: Tensor) -> dict[str, Any]:
    return {"batch_num_tokens": int(mask.sum()), "global_batch_size": int(mask.any(-1).sum())}
