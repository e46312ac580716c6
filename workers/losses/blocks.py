"""Losses of large batches, a block of rows at a time, so that what they compute fits in the cache.

A batch of more than `BLOCK_TOKENS` tokens is computed block by block, and each block's gradient is
taken at once. Beside its inputs only that gradient has the batch's size. Smaller batches are one
block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from workers.losses.aggregate import Denominators

BLOCK_TOKENS = 2**18
"""Tokens of a block, at least one row: a column of them takes one MiB in float32."""

Numbers = tuple[Tensor, ...]
Share = Callable[[Tensor, slice, Denominators], tuple[Tensor, dict[str, Tensor]]]
"""(predictions of some rows, these rows, counts of the whole) -> (their share of the loss, and of
metrics).
"""


def row_blocks(column: Tensor) -> list[slice]:
    """The rows of each block of a column [rows, R]."""
    num_rows = max(BLOCK_TOKENS // max(column.shape[1], 1), 1)
    return [slice(start, start + num_rows) for start in range(0, len(column), num_rows)]


def sum_over_blocks(
    share: Share, predicted: Tensor, mask: Tensor, denominators: Denominators
) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss and its metrics as the sums of its blocks' shares; `predicted` has a gradient."""
    if mask.numel() <= BLOCK_TOKENS:
        return share(predicted, slice(None), denominators)

    counts = denominators.copy()
    if counts.get("batch_num_tokens") is None:
        counts["batch_num_tokens"] = torch.count_nonzero(mask)
    if counts.get("global_batch_size") is None:
        counts["global_batch_size"] = mask.bool().any(dim=-1).sum()
    names: list[str] = []

    def compute(leaf: Tensor, rows: slice) -> Numbers:
        total, beside = share(leaf, rows, counts)
        names[:] = beside
        return total, *beside.values()

    total, *numbers = cast(Callable[..., Numbers], _SumOverBlocks.apply)(predicted, compute)
    return total, dict(zip(names, numbers, strict=True))


class _SumOverBlocks(torch.autograd.Function):
    """The sums of what `compute(leaf, rows)` gives over blocks; the first has a gradient."""

    @staticmethod
    def forward(
        ctx: Any, predicted: Tensor, compute: Callable[[Tensor, slice], Numbers]
    ) -> Numbers:
        wants_gradient = predicted.requires_grad
        gradient = torch.empty_like(predicted) if wants_gradient else None
        totals: list[Tensor] = []
        for rows in row_blocks(predicted):
            leaf = predicted[rows].detach().requires_grad_(wants_gradient)
            with torch.set_grad_enabled(wants_gradient):
                numbers = compute(leaf, rows)
            if gradient is not None:
                (gradient[rows],) = torch.autograd.grad(numbers[0], leaf)
            found = [number.detach() for number in numbers]
            totals = [a + b for a, b in zip(totals, found, strict=True)] if totals else found

        ctx.gradient = gradient
        ctx.mark_non_differentiable(*totals[1:])
        return tuple(totals)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *_: Tensor) -> tuple[Tensor, None]:
        gradient, ctx.gradient = ctx.gradient, None
        assert gradient is not None, "a loss in blocks is differentiated once"
        return gradient.mul_(grad_loss), None
