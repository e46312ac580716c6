"""Losses of large batches, computed in blocks of rows that fit in the cache.

A batch of more than `BLOCK_TOKENS` positions, padding included, is computed block by block, and the
gradient of each block is computed immediately. Apart from the inputs, only the gradient has the
size of the batch. A smaller batch is one block.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from workers.losses.aggregate import Denominators, LossAndMetrics, with_slope

BLOCK_TOKENS = 2**18
"""Positions per block, at least one row; a float32 column of this many takes 1 MiB."""

LOSS = ""
"""Name of the loss among the metrics."""
Share = Callable[[Tensor, slice, Denominators], LossAndMetrics]
"""(predictions for some rows, their row range, counts of the whole batch) -> (contribution to the
loss, contributions to the metrics).
"""


def row_blocks(column: Tensor) -> list[slice]:
    """Return the row range of each block of a column [rows, R]."""
    num_rows = max(BLOCK_TOKENS // max(column.shape[1], 1), 1)
    return [slice(start, start + num_rows) for start in range(0, len(column), num_rows)]


def sum_over_blocks(
    share: Share, predicted: Tensor, mask: Tensor, denominators: Denominators
) -> LossAndMetrics:
    """Return a loss and its metrics as sums over blocks; only `predicted` gets a gradient."""
    if mask.numel() <= BLOCK_TOKENS:
        return share(predicted, slice(None), denominators)

    counts = denominators.copy()
    if counts.get("batch_num_tokens") is None:
        counts["batch_num_tokens"] = torch.count_nonzero(mask)
    if counts.get("global_batch_size") is None:
        counts["global_batch_size"] = mask.bool().any(dim=-1).sum()
    wants_gradient = predicted.requires_grad and torch.is_grad_enabled()
    gradient = torch.empty_like(predicted) if wants_gradient else None
    totals: dict[str, Tensor] = {}
    for rows in row_blocks(predicted):
        leaf = predicted[rows].detach().requires_grad_(wants_gradient)
        loss, metrics = share(leaf, rows, counts)
        if gradient is not None:
            (gradient[rows],) = torch.autograd.grad(loss, leaf)
        for name, number in {LOSS: loss, **metrics}.items():
            block = number.detach()
            totals[name] = totals[name] + block if name in totals else block
    total = totals.pop(LOSS)
    return total if gradient is None else with_slope(total, gradient, predicted), totals
