"""Functions on padded batches: sums and means inside masks, and log-probs and entropy of logits.

A mask may have any dtype; non-zero means inside (`last_places` needs a mask of zeros and ones).
Values outside, NaN included, never affect a result, and an empty mask gives zero.

Neither the forward nor the backward pass stores the softmax over the vocabulary for all rows: they
compute it in slices of rows, or, if `fused`, in compiled kernels that store only their results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype by bytes per value."""


def zero_outside(values: Tensor, mask: Tensor) -> Tensor:
    """Return the values inside the mask, zero outside: `torch.where(mask, values, 0)`, bit for bit.

    On CPUs `where` branches per value, which takes four to twenty times as long as this product.
    """
    mask = mask.bool()
    if not values.requires_grad:
        return _bits_inside(values, mask)
    apply: Callable[[Tensor, Tensor], Tensor] = _ZeroOutside.apply
    return apply(*torch.broadcast_tensors(values, mask))


def _bits_inside(values: Tensor, mask: Tensor) -> Tensor:
    """Multiply the bits, as integers, by one or zero: NaN and infinities outside become zero."""
    return (values.view(INTEGERS[values.element_size()]) * mask).view(values.dtype)


class _ZeroOutside(torch.autograd.Function):
    """Set values outside a mask to zero, and their gradients."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return _bits_inside(values, mask)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return zero_outside(gradient, mask), None


def masked_sum(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Return the sum of the values inside the mask, over everything or along `axis`."""
    selected = zero_outside(values, mask)
    return selected.sum() if axis is None else selected.sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: int | tuple[int, ...] | None = None) -> Tensor:
    """Return the mean of the values inside the mask; zero if the mask is empty."""
    mask = mask.bool().expand_as(values)
    return masked_sum(values, mask, axis) / torch.count_nonzero(mask, dim=axis).clamp(min=1)


def last_places(mask: Tensor) -> Tensor:
    """Return the position of each row's last true entry, [rows]; 0 in a row without any.

    A mask may have holes, so this is not the row's count minus one.
    """
    return (mask * torch.arange(mask.shape[-1], device=mask.device)).amax(dim=-1)


CHUNK_BYTES = 4 * 2**20
"""Bytes of fp32 logits in a chunk; at most four buffers of this size are alive at once."""
BYTES_ON_GPU = 32 * 2**20
"""`CHUNK_BYTES` on a GPU, where chunks are larger so that kernel launches do not dominate."""


class _TokenStats(torch.autograd.Function):
    """Log-prob of the label and entropy of every row of logits, a chunk of rows at a time.

    Logits are [rows, vocabulary]. The forward pass saves one number per row, the log of the
    softmax's denominator. The backward pass recomputes each chunk's probabilities from it, so only
    the logits and their gradient have the logits' size.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        want_entropy: bool,
        temperature: float,
        inplace_backward: bool,
        fused: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.temperature, ctx.inplace_backward, ctx.fused = temperature, inplace_backward, fused
        ctx.set_materialize_grads(False)
        wide = torch.promote_types(logits.dtype, torch.float32)
        if fused:
            stats = _compiled(_row_stats)(logits, labels, wide, temperature, want_entropy)
            log_norm, logprob, entropy = stats
            ctx.save_for_backward(logits, labels, log_norm, entropy)
            return logprob, entropy

        log_norm = torch.empty(logits.shape[0], dtype=wide, device=logits.device)
        logprob = torch.empty_like(log_norm)
        entropy = torch.empty_like(log_norm) if want_entropy else None

        for rows in row_chunks(logits):
            scaled = scaled_rows(logits[rows], wide, temperature)
            log_norm[rows] = scaled.logsumexp(dim=-1)
            logprob[rows] = scaled.gather(-1, labels[rows, None]).squeeze(-1) - log_norm[rows]
            if entropy is not None:
                probs = (scaled - log_norm[rows, None]).exp_()
                entropy[rows] = torch.special.entr(probs).sum(dim=-1)

        ctx.save_for_backward(logits, labels, log_norm, entropy)
        return logprob, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprob: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_logprob is None and grad_entropy is None:
            return (None,) * 6
        logits, labels, log_norm, entropy = ctx.saved_tensors
        stats = labels, log_norm, entropy
        if ctx.fused:
            grad = logits if ctx.inplace_backward else logits.clone()
            _compiled(_row_gradient)(grad, *stats, grad_logprob, grad_entropy, ctx.temperature)
        else:
            grads = grad_logprob, grad_logprob, grad_entropy
            grad = gradient_of_logits(logits, *stats, *grads, ctx.temperature, ctx.inplace_backward)
        return (grad, *(None,) * 5)


def _row_stats(
    logits: Tensor, labels: Tensor, wide: torch.dtype, temperature: float, want_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return log of the denominator, log-prob of the label, and entropy of every row."""
    scaled = scaled_rows(logits, wide, temperature)
    log_norm = scaled.logsumexp(dim=-1)
    logprob = scaled.gather(-1, labels[:, None]).squeeze(-1) - log_norm
    if not want_entropy:
        return log_norm, logprob, None
    probs = (scaled - log_norm[:, None]).exp()
    return log_norm, logprob, torch.special.entr(probs).sum(dim=-1)


def _row_gradient(
    logits: Tensor,
    labels: Tensor,
    log_norm: Tensor,
    entropy: Tensor | None,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float,
) -> None:
    """Replace logits by their gradient, as in `gradient_of_logits`."""
    probs = (scaled_rows(logits, log_norm.dtype, temperature) - log_norm[:, None]).exp()
    grad = torch.zeros_like(probs)
    if grad_entropy is not None:
        assert entropy is not None, "a gradient of the entropy comes with the entropy"
        grad = (torch.special.entr(probs) - probs * entropy[:, None]) * grad_entropy[:, None]
    if grad_logprob is not None:
        is_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
        grad = grad + (is_label.to(probs.dtype) - probs) * grad_logprob[:, None]
    logits.copy_(grad / temperature)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function compiled for any number of rows."""
    return torch.compile(function, dynamic=True)


def gradient_of_logits(
    logits: Tensor,
    labels: Tensor,
    log_norm: Tensor,
    entropy: Tensor | None,
    grad_logprob: Tensor | None,
    grad_label: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float,
    inplace: bool,
) -> Tensor:
    """Return the gradient of logits [rows, words] from the gradients of log-prob and entropy.

    The words may be a slice of the vocabulary: `grad_label` equals `grad_logprob` in rows whose
    label is in the slice, and is zero in the others.
    """
    grad_logits = logits if inplace else torch.empty_like(logits)
    for rows in row_chunks(logits):
        scaled = scaled_rows(logits[rows], log_norm.dtype, temperature)
        probs = scaled.sub(log_norm[rows, None]).exp_()
        del scaled  # before the next buffer of its size
        grad = torch.zeros_like(probs)
        if grad_entropy is not None:
            assert entropy is not None, "a gradient of the entropy comes with the entropy"
            # d entropy / d logit = -p (log p + entropy), and entr(p) = -p log p
            torch.special.entr(probs, out=grad)
            grad.addcmul_(probs, entropy[rows, None], value=-1)
            grad.mul_(grad_entropy[rows, None])
        if grad_logprob is not None:
            assert grad_label is not None, "the label's log-prob is one of the words'"
            # d logprob / d logit = [logit is the label's] - p
            grad.addcmul_(probs, grad_logprob[rows, None], value=-1)
            grad.scatter_add_(-1, labels[rows, None], grad_label[rows, None])
        grad_logits[rows] = grad.div_(temperature)
    return grad_logits


def slice_bytes(device_type: str) -> int:
    """Return CHUNK_BYTES, or BYTES_ON_GPU on a GPU."""
    return CHUNK_BYTES if device_type == "cpu" else BYTES_ON_GPU


def row_chunks(logits: Tensor) -> list[slice]:
    """Return slices of rows whose logits, in fp32, take `slice_bytes` at most."""
    step = max(1, slice_bytes(logits.device.type) // (4 * max(1, logits.shape[-1])))
    return [slice(start, start + step) for start in range(0, logits.shape[0], step)]


def scaled_rows(chunk: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    """Return a chunk of logits in `dtype`, divided by the temperature."""
    wide = chunk.to(dtype)
    return wide if temperature == 1.0 else wide / temperature


_token_stats: Callable[..., tuple[Any, Any]] = _TokenStats.apply


def logprobs_and_entropy_from_logits(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    inplace_backward: bool = False,
    fused: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the label's log-prob and the entropy, in one pass over logits [..., vocabulary].

    The logits are divided by the temperature. The results are at least fp32. At most 40 MiB, or 160
    MiB on a GPU, are allocated besides the logits and their gradient. `inplace_backward` overwrites
    the logits with the gradient, for a caller that does not read them again. `fused` compiles the
    computation (torch.compile), which on a GPU takes a sixth of the time.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    options = temperature, inplace_backward, fused
    logprob, entropy = _token_stats(flat, labels.reshape(-1), True, *options)
    return logprob.view(labels.shape), entropy.view(labels.shape)


def logprobs_from_logits(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    inplace_backward: bool = False,
    fused: bool = False,
) -> Tensor:
    """Return the log-prob of each label under logits [..., vocabulary] / temperature.

    Memory and options are those of `logprobs_and_entropy_from_logits`.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    options = temperature, inplace_backward, fused
    logprob, _ = _token_stats(flat, labels.reshape(-1), False, *options)
    result: Tensor = logprob.view(labels.shape)
    return result


@torch.no_grad()
def sum_pi_squared_from_logits(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return the sum of squared probabilities of logits [..., vocabulary] / temperature.

    It has no gradient. Memory is bounded as in `logprobs_and_entropy_from_logits`.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    wide = torch.promote_types(logits.dtype, torch.float32)
    result = torch.empty(flat.shape[0], dtype=wide, device=logits.device)
    for rows in row_chunks(flat):
        probs = scaled_rows(flat[rows], wide, temperature).softmax(dim=-1)
        result[rows] = probs.square_().sum(dim=-1)
    return result.view(logits.shape[:-1])
