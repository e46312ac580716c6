"""Reduce token losses to one number that adds up over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict, Unpack

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.errors import ConfigError, nearest
from verl_like.tensor_ops import masked_mean, masked_sum, zero_outside

AGGREGATIONS: Mapping[str, tuple[str, str]] = {
    "token-mean": (
        "The sum over all tokens of the mini-batch, divided by their count.",
        "DAPO, arXiv 2503.14476",
    ),
    "token-sum": (
        "The sum over all tokens, divided by nothing, so the step grows with the mini-batch.",
        "summed policy gradient, Williams 1992",
    ),
    "seq-mean-token-sum": (
        "The sum over all tokens, divided by the count of rows that have any.",
        "the policy gradient of whole sequences, Williams 1992",
    ),
    "seq-mean-token-mean": (
        "The mean over each row's tokens, then the mean over rows that have any.",
        "GRPO, arXiv 2402.03300",
    ),
    "seq-mean-token-sum-norm": (
        "seq-mean-token-sum, divided by `loss_scale_factor` (default: `data.max_response_length`).",
        "Dr. GRPO, arXiv 2503.20783",
    ),
}
"""`loss_agg_mode` -> (formula in words, source)."""


LossAndMetrics = tuple[Tensor, dict[str, Tensor]]
"""A loss and its metrics by name; both add up over micro-batches and ranks."""


class Denominators(TypedDict, total=False):
    """Denominators for `agg_loss`. The counts are those of the global mini-batch."""

    batch_num_tokens: int | float | Tensor | None
    """Tokens inside the mask; used by token-mean and by the metrics of `agg_policy_loss`."""
    global_batch_size: int | float | Tensor | None
    """Rows with at least one token inside the mask; used by the three seq-mean modes."""
    loss_scale_factor: int | float | None
    """Constant divisor in seq-mean-token-sum-norm; by default, the width of the mask."""


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    batch_num_tokens: int | float | Tensor | None = None,
    global_batch_size: int | float | Tensor | None = None,
    loss_scale_factor: int | float | None = None,
) -> Tensor:
    """Return the contribution of these rows to the loss of the global mini-batch, a scalar.

        losses = torch.tensor([[0.5, 1.5], [4.0, 0.0]])
        agg_loss(losses, torch.tensor([[1, 1], [1, 0]]), "token-mean")      # 2.0

    The contributions of all micro-batches on all ranks add up to the loss, so gradients are summed
    over ranks, not averaged.

    Args:
        loss_mat: the token losses, [rows, R], with R response tokens.
        loss_mask: [rows, R], nonzero for the tokens in the loss, such as `response_mask`.
        loss_agg_mode: "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean" or
            "seq-mean-token-sum-norm"; docs/algorithms.md has their formulas.
        batch_num_tokens: tokens of the global mini-batch; None counts the tokens of these rows.
        global_batch_size: rows of the global mini-batch that have a token inside the mask; None
            counts such rows among these.
        loss_scale_factor: the divisor in "seq-mean-token-sum-norm"; None is R.

    Raises:
        ConfigError: `loss_agg_mode` is unknown.
    """
    if loss_agg_mode not in AGGREGATIONS:
        raise ConfigError(
            f"unknown loss_agg_mode {loss_agg_mode!r}. Known: {', '.join(AGGREGATIONS)}."
            f"{nearest(loss_agg_mode, AGGREGATIONS)}"
        )
    mask = loss_mask.bool()

    if loss_agg_mode == "token-mean":
        num_tokens = torch.count_nonzero(mask) if batch_num_tokens is None else batch_num_tokens
        return masked_sum(loss_mat, mask) / _at_least_one(num_tokens, mask.device)

    if loss_agg_mode == "token-sum":
        return masked_sum(loss_mat, mask)

    if global_batch_size is None:
        global_batch_size = mask.any(dim=-1).sum()
    num_rows = _at_least_one(global_batch_size, mask.device)
    if loss_agg_mode == "seq-mean-token-mean":
        return masked_mean(loss_mat, mask, axis=-1).sum() / num_rows

    total = masked_sum(loss_mat, mask) / num_rows
    if loss_agg_mode == "seq-mean-token-sum":
        return total
    return total / (loss_scale_factor or loss_mask.shape[-1])


def _at_least_one(count: int | float | Tensor, device: torch.device) -> Tensor:
    return torch.as_tensor(count, device=device).clamp(min=1)


def compute_lm_loss(
    log_probs: Tensor, mask: Tensor, **denominators: Unpack[Denominators]
) -> Tensor:
    """Return these rows' contribution to the LM loss, the mini-batch mean of -log_prob in the mask.

    `log_probs` and `mask` are [rows, R]; the result is a scalar.

    Source: PTX is the extra term of PPO in InstructGPT, arXiv 2203.02155, equation 2
    """
    return agg_loss(-log_probs, mask, "token-mean", **denominators)


def agg_policy_loss(
    losses: Tensor,
    per_token: Mapping[str, Tensor],
    response_mask: Tensor,
    loss_agg_mode: str,
    rollout_is_weights: Tensor | None,
    **denominators: Unpack[Denominators],
) -> LossAndMetrics:
    """Return the aggregated loss, with weights if given, and the token means of `per_token`.

    `losses`, `rollout_is_weights` and the values of `per_token` are [rows, R]; results are scalars.
    The token means are over the global mini-batch, so they add up like the loss.
    """
    if rollout_is_weights is not None:
        losses = losses * zero_outside(rollout_is_weights.detach(), response_mask)
    loss = agg_loss(losses, response_mask, loss_agg_mode, **denominators)

    mask = response_mask.bool()
    num_tokens = denominators.get("batch_num_tokens")
    if num_tokens is None:
        num_tokens = torch.count_nonzero(mask)
    metrics = {}
    for name, values in per_token.items():
        if values.dtype == torch.bool:
            share = torch.count_nonzero(values & mask) / _at_least_one(num_tokens, mask.device)
            metrics[name] = share.to(losses.dtype)
        else:
            metrics[name] = agg_loss(values.detach(), response_mask, "token-mean", **denominators)
    return loss, metrics


Numbers = Mapping[str, "float | Tensor"]


class Gauge:
    """Accumulates sums and maxima over any number of micro-batches."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.maxima: dict[str, float] = {}

    def note(self, sums: Numbers, maxima: Numbers | None = None) -> None:
        """Add the numbers of some rows."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        for name, value in (maxima or {}).items():
            largest = np.maximum(self.maxima.get(name, -np.inf), float(value))  # NaN wins
            self.maxima[name] = float(largest)

    def all_reduce(self, group: dist.ProcessGroup | None) -> None:
        """Combine the sums and maxima of all ranks; every rank must call this."""
        if group is None:
            return
        of_ranks: list[tuple[Numbers, Numbers]] = [({}, {}) for _ in range(group.size())]
        dist.all_gather_object(of_ranks, (self.sums, self.maxima), group=group)
        self.sums, self.maxima = {}, {}
        for figures in of_ranks:
            self.note(*figures)


BLOCK_TOKENS = 2**18
"""Positions of a block of rows, at least one row; a float32 column of this many takes 1 MiB."""


def row_blocks(column: Tensor) -> list[slice]:
    """Return the row range of each block of a column [rows, R], because metrics need copies."""
    num_rows = max(BLOCK_TOKENS // max(column.shape[1], 1), 1)
    return [slice(start, start + num_rows) for start in range(0, len(column), num_rows)]


class MaskedRows:
    """Some rows of a batch: the mask of their tokens, and the number of tokens per row."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.lengths = mask.sum(dim=-1)
        self.filled = self.lengths > 0
        self.places = mask.flatten().nonzero().squeeze(-1)
        self.num_tokens = len(self.places)
        self.num_rows = int(self.filled.sum())

    def tokens(self, values: Tensor) -> Tensor:
        """Return the values of the tokens inside the mask, flat."""
        return values.expand_as(self.mask).flatten().index_select(0, self.places)

    def rows(self, values: Tensor) -> Tensor:
        """Return the mean of every row that has tokens.

        `values` are zero outside the mask, or have one column.
        """
        if values.shape[-1] == 1:
            return values[self.filled, 0]
        return (values.sum(dim=-1) / self.lengths)[self.filled]
