"""Small batches: on variants of them, a loss or estimator must give consistent results.

A mask is written as text, one word per row: `.` is a token outside the mask (the prompt, an
observation, padding) and `1` a token of the response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workers.losses.preference import COLUMNS

Batch = dict[str, Any]
"""Columns: tensors [rows, ...], and `index`, an array [rows]."""
PAIRED = (*COLUMNS, "gap")
"""Columns that preference losses read; rows are pairs or labeled responses."""
MASKS = (
    "..1",
    "..11 ..11",
    "..1111 ..1...",
    "11. 1.. 111 1..",
    "..1.11 ...... ..11.. ..1...",
    "..111 ..1.. ..111 ..11.",
    "..1111111111111111 ..1...............",
    "..11111 ..111.. ..1.... ....... ..1.111 ..11...",
)
MOVES = (0.0, 0.3, 2.0)
"""Standard deviations of log-ratios, by seed: on-policy, after some updates, far off-policy."""
ZERO_OUTSIDE = ("token_level_rewards", "token_level_scores", "step_ends", "chosen_tokens")
"""Columns that are always zero outside the mask."""


def all_batches() -> list[Batch]:
    """Return all batches, small masks first."""
    return [make_batch(mask, seed) for mask in MASKS for seed in range(len(MOVES))]


def make_batch(mask_text: str, seed: int = 0) -> Batch:
    """Return a batch in float64 with every column that a function may read."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[letter == "1" for letter in row] for row in mask_text.split()]).long()
    rows, width = mask.shape

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old, values, scores = -normal(rows, width).abs() - 0.1, normal(rows, width), normal(rows, 1)
    step_ends = mask.flip(1).cumsum(1).flip(1).eq(1) & mask.bool()
    of_tokens = {
        "old_log_prob": old,
        "log_prob": (old + MOVES[seed] * normal(rows, width)).clamp(max=-0.05),
        "ref_log_prob": (old + 0.2 * normal(rows, width)).clamp(max=-0.05),
        "advantages": normal(rows, 1 if seed < 2 else width) * mask,
        "response_mask": mask,
        "vpreds": values + MOVES[seed] * normal(rows, width),
        "returns": values + normal(rows, width),
        "values": values,
        "token_level_rewards": scores * step_ends,
        "token_level_scores": scores * step_ends,
        "step_ends": step_ends.long(),
        "index": np.array([f"prompt {row // 2}" for row in range(rows)], dtype=object),
        "named_rewards": normal(rows, 2),
        "reward_baselines": normal(rows),
        "sum_pi_squared": old.exp().square() + 0.1,
        "chosen_tokens": mask.bool() & (torch.arange(width) % 3 == 0),
    }
    log_probs, gap = -3 * normal(rows, 2).abs() - 1, normal(rows)
    return of_tokens | {
        "log_probs": log_probs,
        "ref_log_probs": log_probs + MOVES[seed] * normal(rows, 2),
        "num_tokens": torch.stack([mask.sum(1), mask.flip(0).sum(1)], dim=1).double(),
        "margin": normal(rows).abs(),
        "gap": gap,
        "desirable": torch.arange(rows) % 2,
        "mismatched_kl": gap.mean().clamp(min=0).repeat(rows),
    }


def has_token(batch: Batch) -> bool:
    """Return whether any token is inside the mask."""
    return bool(batch["response_mask"].any())


def select_rows(batch: Batch, rows: Tensor) -> Batch:
    """Return these rows of the batch."""
    return {name: column[rows.numpy()] for name, column in batch.items()}


def map_tokens(batch: Batch, change: Callable[[Tensor], Tensor], but: Sequence[str] = ()) -> Batch:
    """Apply `change` to every column [rows, tokens], except to the columns that `but` names."""
    others, shape = {*PAIRED, "named_rewards", *but}, batch["response_mask"].shape
    return {n: change(c) if c.shape == shape and n not in others else c for n, c in batch.items()}


def smaller(batch: Batch) -> Iterator[Batch]:
    """Yield simpler batches: each without one row or one position, and one with rounded numbers."""
    rows, places = (torch.arange(size) for size in batch["response_mask"].shape)
    yield from (select_rows(batch, rows[rows != row]) for row in rows)
    for place in places.flip(0):
        yield map_tokens(batch, partial(torch.index_select, dim=1, index=places[places != place]))
    floats = {n: c for n, c in batch.items() if c.dtype == torch.float64}
    rounded = {name: column.round(decimals=1) for name, column in floats.items()}
    if any(not torch.equal(rounded[name], floats[name]) for name in floats):
        yield batch | rounded
