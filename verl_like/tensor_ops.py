"""Tensor arithmetic on padded batches, with verl's names: torch only, no state, no distribution.

Here live masked reductions (advantages, losses and metrics use them), log-probs and entropy of
logits in bounded memory (the training engine and the rollout use them), padding (data and rollout),
and the balancing of sequence lengths over ranks and micro-batches (the driver and the engine). A
mask may be of any dtype: non-zero is inside. What lies outside a mask is never read into a result,
NaN included, and an empty mask gives zero.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from verl_like.errors import BatchError

_CHUNK_BYTES = 4 * 2**20  # of fp32 logits; at most four buffers of this size are alive at once


# -------------------------------------------------------------------------------- masked reductions


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Sum of the values inside the mask, over all of it or along `axis`."""
    kept = torch.where(mask.bool(), values, 0)
    return kept.sum() if axis is None else kept.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Mean of the values inside the mask; zero where the mask is empty."""
    inside = mask.bool().expand_as(values)
    return masked_sum(values, inside, axis) / torch.count_nonzero(inside, dim=axis).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of the values inside the mask; zero for fewer than two of them."""
    inside = mask.bool().expand_as(values)
    centered = torch.where(inside, values - masked_mean(values, inside), 0)
    return centered.square().sum() / (torch.count_nonzero(inside) - int(unbiased)).clamp(min=1)


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Values inside the mask scaled to variance 1 and, unless `shift_mean=False`, mean 0; zero
    outside the mask.
    """
    inside = mask.bool().expand_as(values)
    mean = masked_mean(values, inside)
    centered = torch.where(inside, values - mean, 0)
    var = torch.linalg.vector_norm(centered).square() / (torch.count_nonzero(inside) - 1).clamp(
        min=1
    )
    whitened = centered * torch.rsqrt(var + 1e-8)
    return whitened if shift_mean else torch.where(inside, whitened + mean, 0)


# ------------------------------------------------------------------ log-probs and entropy of logits


class _TokenStats(torch.autograd.Function):
    """(log-prob of the label, entropy) of every row of [rows, vocabulary] logits, a chunk of rows
    at a time.

    Forward keeps one number a row, the log of the softmax's denominator; backward rebuilds each
    chunk's probabilities from it, so nothing of the logits' size exists besides them and their
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor | None,
        want_entropy: bool,
        temperature: float,
        inplace_backward: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        wide = torch.promote_types(logits.dtype, torch.float32)
        num_rows = logits.shape[0]
        log_norm = torch.empty(num_rows, dtype=wide, device=logits.device)
        logprob = torch.empty_like(log_norm) if labels is not None else None
        entropy = torch.empty_like(log_norm) if want_entropy else None
        for rows in _row_chunks(logits):
            scaled = _scaled(logits[rows], wide, temperature)
            log_norm[rows] = scaled.logsumexp(dim=-1)
            if logprob is not None and labels is not None:
                logprob[rows] = scaled.gather(-1, labels[rows, None]).squeeze(-1) - log_norm[rows]
            if entropy is not None:
                entropy[rows] = torch.special.entr((scaled - log_norm[rows, None]).exp_()).sum(
                    dim=-1
                )
        ctx.save_for_backward(logits, labels, log_norm, entropy)
        ctx.temperature, ctx.inplace_backward = temperature, inplace_backward
        ctx.set_materialize_grads(False)
        return logprob, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_logprob is None and grad_entropy is None:
            return None, None, None, None, None
        logits, labels, log_norm, entropy = ctx.saved_tensors
        grad_logits = logits if ctx.inplace_backward else torch.empty_like(logits)
        for rows in _row_chunks(logits):
            probs = (
                _scaled(logits[rows], log_norm.dtype, ctx.temperature)
                .sub(log_norm[rows, None])
                .exp_()
            )
            grad = torch.zeros_like(probs)
            if (
                grad_entropy is not None
            ):  # d entropy / d logit = -p (log p + entropy), and entr(p) = -p log p
                grad = torch.special.entr(probs, out=grad).addcmul_(
                    probs, entropy[rows, None], value=-1
                )
                grad.mul_(grad_entropy[rows, None])
            if grad_logprob is not None:  # d logprob / d logit = [logit is the label's] - p
                grad.addcmul_(probs, grad_logprob[rows, None], value=-1)
                grad.scatter_add_(-1, labels[rows, None], grad_logprob[rows, None])
            grad_logits[rows] = grad.div_(ctx.temperature)
        return grad_logits, None, None, None, None


def _row_chunks(logits: Tensor) -> list[slice]:
    step = max(1, _CHUNK_BYTES // (4 * max(1, logits.shape[-1])))
    return [slice(start, start + step) for start in range(0, logits.shape[0], step)]


def _scaled(chunk: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    wide = chunk.to(dtype)
    return wide if temperature == 1.0 else wide / temperature


_token_stats: Callable[..., tuple[Any, Any]] = _TokenStats.apply


def logprobs_and_entropy_from_logits(
    logits: Tensor, labels: Tensor, *, temperature: float = 1.0, inplace_backward: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-prob of each label and entropy, of logits [..., vocabulary] / temperature, in one pass;
    at least fp32.

    Beside the logits and their gradient at most 40 MiB are alive. `inplace_backward` writes the
    gradient over the logits, for a caller that never reads them again.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    logprob, entropy = _token_stats(flat, labels.reshape(-1), True, temperature, inplace_backward)
    return logprob.view(labels.shape), entropy.view(labels.shape)


def logprobs_from_logits(
    logits: Tensor, labels: Tensor, *, temperature: float = 1.0, inplace_backward: bool = False
) -> Tensor:
    """Log-prob of each label under logits [..., vocabulary] / temperature; memory as in the fused
    form.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    logprob, _ = _token_stats(flat, labels.reshape(-1), False, temperature, inplace_backward)
    result: Tensor = logprob.view(labels.shape)
    return result


def entropy_from_logits(
    logits: Tensor, *, temperature: float = 1.0, inplace_backward: bool = False
) -> Tensor:
    """Entropy of the softmax of logits [..., vocabulary] / temperature; memory as in the fused
    form.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    _, entropy = _token_stats(flat, None, True, temperature, inplace_backward)
    result: Tensor = entropy.view(logits.shape[:-1])
    return result


# ------------------------------------------------------------------------------------------ padding


def pad_2d_list_to_length(
    response: Sequence[Sequence[int]], pad_token_id: int, max_length: int | None = None
) -> Tensor:
    """Token lists as an int64 tensor, padded on the right to the longest or to `max_length`, if
    that is more.
    """
    width = max([max_length or 0, *(len(tokens) for tokens in response)])
    padded = torch.full((len(response), width), pad_token_id, dtype=torch.int64)
    for row, tokens in enumerate(response):
        padded[row, : len(tokens)] = torch.as_tensor(tokens, dtype=torch.int64)
    return padded


def pad_sequence_to_length(
    tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False
) -> Tensor:
    """The last dim padded to `max_seq_len`, on the right or the left; a wider tensor is returned as
    it is.
    """
    missing = max_seq_len - tensors.shape[-1]
    if missing <= 0:
        return tensors
    return torch.nn.functional.pad(
        tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id
    )


def compute_position_ids(attention_mask: Tensor) -> Tensor:
    """Position of every token among its row's real ones, from 0; padding before the first one is at
    0 too.
    """
    return (attention_mask.to(torch.int64).cumsum(dim=-1) - 1).clamp(min=0)


# --------------------------------------------------------------------------------- length balancing

_Parts = list[
    tuple[int, list[int]]
]  # (total length, rows) of each non-empty partition, heaviest first


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool = False
) -> list[list[int]]:
    """Rows in `k_partitions` sets of nearly equal total length, none empty; with `equal_size` of
    equal row counts too.

    Karmarkar and Karp's largest differencing method, "The differencing method of set partitioning"
    (UCB/CSD 82/113, 1982). Depends on nothing but its arguments: ties go to the lower row, rows
    ascend in a set, sets in their first row.
    """
    num_rows = len(seqlen_list)
    if not 1 <= k_partitions <= num_rows:
        raise BatchError(
            f"cannot cut {num_rows} rows into {k_partitions} non-empty partitions; take 1 to "
            f"{num_rows}."
        )
    if equal_size and num_rows % k_partitions:
        raise BatchError(
            f"{num_rows} rows do not make {k_partitions} partitions of equal row counts; "
            f"take equal_size=False, or {num_rows - num_rows % k_partitions} rows."
        )
    by_length = sorted(range(num_rows), key=lambda row: (-seqlen_list[row], row))
    rows_at_once = k_partitions if equal_size else 1
    heap: list[
        tuple[int, int, _Parts]
    ] = []  # (minus the spread, lowest row, parts); no two share their lowest row
    for start in range(0, num_rows, rows_at_once):
        rows = by_length[start : start + rows_at_once]
        parts = [(int(seqlen_list[row]), [row]) for row in rows]
        heapq.heappush(heap, (-_spread(parts, k_partitions), min(rows), parts))
    while len(heap) > 1:
        (_, low, one), (_, other_low, other) = heapq.heappop(heap), heapq.heappop(heap)
        parts = _merge_opposed(one, other, k_partitions)
        heapq.heappush(heap, (-_spread(parts, k_partitions), min(low, other_low), parts))
    return sorted(sorted(rows) for _, rows in heap[0][-1])


def _spread(parts: _Parts, k: int) -> int:
    return parts[0][0] - (parts[-1][0] if len(parts) == k else 0)


def _merge_opposed(one: _Parts, other: _Parts, k: int) -> _Parts:
    """The heaviest part of one joined with the lightest of the other, and so on; absent parts count
    as empty.
    """
    padded_one = one + [(0, [])] * (k - len(one))
    padded_other = other + [(0, [])] * (k - len(other))
    joined = [
        (a + b, left + right)
        for (a, left), (b, right) in zip(padded_one, reversed(padded_other), strict=True)
    ]
    return sorted((part for part in joined if part[1]), key=lambda part: (-part[0], part[1]))


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """The inverse permutation: reordering by `idx_map`, then by the result, changes nothing."""
    inverse = [0] * len(idx_map)
    for position, row in enumerate(idx_map):
        inverse[row] = position
    return inverse
