"""Losses of large batches, a block of rows at a time, so that what they compute fits in the cache.

A loss whose parts add up is decorated by `in_blocks`; of a batch of more than `BLOCK_TOKENS` tokens
it is then called once a block, and each block's gradient is taken at once. Beside its inputs only
that gradient has the batch's size. Smaller batches are one call, as written.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

BLOCK_TOKENS = 2**18
"""Tokens of a block, at least one row: a column of them takes one MiB in float32."""

Loss = TypeVar("Loss", bound=Callable[..., Any])
Numbers = tuple[Tensor, ...]


def row_blocks(column: Tensor) -> list[slice]:
    """The rows of each block of a column [rows, R]."""
    num_rows = max(BLOCK_TOKENS // max(column.shape[1], 1), 1)
    return [slice(start, start + num_rows) for start in range(0, len(column), num_rows)]


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


def in_blocks(predicted: str) -> Callable[[Loss], Loss]:
    """Have a loss called block by block; `predicted` names the parameter that has a gradient.

    The loss returns its share of a mini-batch's loss, and one number or a dict of them beside it.
    """

    def decorate(loss: Loss) -> Loss:
        called = functools.partial(_whole_or_by_blocks, loss, predicted)
        return cast(Loss, functools.update_wrapper(called, loss))

    return decorate


def _whole_or_by_blocks(loss: Callable[..., Any], predicted: str, *args: Any, **kwargs: Any) -> Any:
    signature = inspect.signature(loss)
    bound = signature.bind(*args, **kwargs)
    denominators = bound.arguments.pop("denominators", {})
    given = {**bound.arguments, **denominators}
    # a loss that has yet to choose among its tokens must see them all
    chooses = "chosen_tokens" in signature.parameters and "chosen_tokens" not in given
    if chooses or given["response_mask"].numel() <= BLOCK_TOKENS:
        return loss(*args, **kwargs)
    return _by_blocks(loss, given, predicted)


def _by_blocks(loss: Callable[..., Any], given: dict[str, Any], predicted: str) -> Any:
    mask = given["response_mask"].bool()
    given = {**given, "response_mask": mask}
    columns = {name: x for name, x in given.items() if _is_column(x, mask) and name != predicted}
    settings = {name: x for name, x in given.items() if name not in (*columns, predicted)}
    if settings.get("batch_num_tokens") is None:
        settings["batch_num_tokens"] = torch.count_nonzero(mask)
    if settings.get("global_batch_size") is None:
        settings["global_batch_size"] = mask.any(dim=-1).sum()

    names: list[str] = []

    def compute(leaf: Tensor, rows: slice) -> Numbers:
        of_block = {name: column[rows] for name, column in columns.items()}
        total, beside = loss(**{predicted: leaf}, **of_block, **settings)
        if not isinstance(beside, dict):
            return total, beside
        names[:] = beside
        return total, *beside.values()

    sum_over_blocks = cast(Callable[..., Numbers], _SumOverBlocks.apply)
    total, *numbers = sum_over_blocks(given[predicted], compute)
    return (total, dict(zip(names, numbers, strict=True))) if names else (total, numbers[0])


def _is_column(value: Any, mask: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == mask.shape
