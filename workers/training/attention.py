"""Attention over rows that are laid end to end as one packed row, without padding.

`workers.training.packing` builds a `RowLayout` and passes it to the module's forward under the name
`row_layout`, which transformers hands on to the attention function.

A packed row needs a mask that keeps its rows apart. A dense one costs the square of all tokens.
Here rows of like length are laid as the rows of a rectangle, padded on the right: causal attention
needs no mask then, since the padding comes after all that is real in its row. So time follows the
real tokens, on every device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

PACKED = "row_layout_sdpa"
"""Name of `packed_attention` in transformers' interface."""
MAX_SHORT = 80
"""Widest rectangle, in tokens, for which matrix products beat the fused kernel of the CPU."""


@dataclass(frozen=True)
class Rectangle:
    """Neighbouring rows of a packed row, `num_tokens` together, padded to `width` tokens."""

    num_tokens: int
    num_rows: int
    width: int
    gather: Tensor | None
    """Token at each place of the rectangle, counted from its first; None without padding."""
    scatter: Tensor | None
    """Place in the rectangle of each token; None without padding."""


class RowLayout:
    """Where the rows of a packed row are: their rectangles."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        runs = _runs(lengths)
        self.rectangles = [_rectangle(lengths[first:last], device) for first, last in runs]


def _runs(lengths: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of neighbouring rows that share a rectangle.

    At most a fifth of its width, or 8 tokens, is padding.
    """
    first, shortest, longest = 0, lengths[0], lengths[0]
    for row, length in enumerate(lengths):
        low, high = min(shortest, length), max(longest, length)
        if high > max(1.25 * low, low + 8):
            yield first, row
            first, low, high = row, length, length
        shortest, longest = low, high
    yield first, len(lengths)


def _rectangle(lengths: Sequence[int], device: torch.device) -> Rectangle:
    own = torch.tensor(lengths)
    width, num_tokens = int(own.max()), int(own.sum())
    if num_tokens == width * len(own):
        return Rectangle(num_tokens, len(own), width, None, None)

    real = torch.arange(width) < own[:, None]
    gather = torch.zeros(real.shape, dtype=torch.long)
    gather.masked_scatter_(real, torch.arange(num_tokens))
    scatter = real.flatten().nonzero().squeeze(1)
    return Rectangle(num_tokens, len(own), width, gather.flatten().to(device), scatter.to(device))


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    row_layout: RowLayout | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function, each row by itself.

    [1, heads, tokens, size] -> [1, tokens, heads, size].
    """
    if row_layout is None:
        raise TypeError(f"{type(module).__name__} was not given the packed row's layout")

    rectangles = row_layout.rectangles
    sizes = [rectangle.num_tokens for rectangle in rectangles]
    query, key, value = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    parts = zip(rectangles, query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
    pieces = [_attend(*part, scaling, sliding_window) for part in parts]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).unsqueeze(0), None


def _attend(
    rectangle: Rectangle,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """[tokens, heads, size] of the rectangle's rows."""
    width = rectangle.width
    windowed = window is not None and window < width
    q, k, v = (_to_rectangle(states, rectangle) for states in (query, key, value))
    if query.device.type == "cpu" and width <= MAX_SHORT:
        padded = -(-width // 8) * 8
        mask = _causal_mask(padded, window or padded, query.device)
        output = _attend_short(q, k, v, mask, scaling)
    else:
        output = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=_causal_mask(width, window or width, query.device) if windowed else None,
            is_causal=not windowed,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )

    flat = output.transpose(1, 2).reshape(-1, *output.shape[1::2])
    return flat if rectangle.scatter is None else flat.index_select(0, rectangle.scatter)


def _attend_short(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None
) -> Tensor:
    """Causal attention of short rows, [rows, heads, width, size].

    `mask` is that of one row, as wide as the next multiple of eight.
    """
    if query.dtype != value.dtype:
        # autocast casts matrix products only, and queries and keys come from rotations
        query, key = query.to(value.dtype), key.to(value.dtype)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output: Tensor = _ShortAttention.apply(query, key, value, mask, scale)
    return output


class _ShortAttention(torch.autograd.Function):
    """Attention as matrix products; the query heads that share a key are rows of one matrix.

    Rows are padded with zeros to a multiple of eight: products of odd sizes take a third longer.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float
    ) -> Tensor:
        num_rows, heads, width, size = query.shape
        groups, padded = key.shape[1], mask.shape[0]
        queries = _padded(query, padded).view(num_rows * groups, -1, size)
        keys, values = (_padded(states, padded).flatten(0, 1) for states in (key, value))
        bias = query.new_zeros(mask.shape).masked_fill_(~mask, float("-inf"))
        bias = bias.repeat(heads // groups, 1)

        with torch.autocast(query.device.type, enabled=False):
            probs = torch.baddbmm(bias, queries, keys.transpose(1, 2), alpha=scale).softmax(dim=-1)
            output = torch.bmm(probs, values)

        ctx.save_for_backward(queries, keys, values, probs)
        ctx.scale, ctx.shapes = scale, (query.shape, key.shape, value.shape)
        return output.view(num_rows, heads, padded, -1)[:, :, :width]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, probs = ctx.saved_tensors
        padded = keys.shape[1]
        own = _padded(grad, padded).view(queries.shape[0], -1, values.shape[-1])
        grad_probs = torch.bmm(own, values.transpose(1, 2))
        scores = torch._softmax_backward_data(grad_probs, probs, -1, probs.dtype)

        unused = grad.new_empty(())  # as beta=0, the first argument is not read
        grads = (
            torch.baddbmm(unused, scores, keys, beta=0, alpha=ctx.scale),
            torch.baddbmm(unused, scores.transpose(1, 2), queries, beta=0, alpha=ctx.scale),
            torch.bmm(probs.transpose(1, 2), own),
        )
        pairs = zip(grads, ctx.shapes, strict=True)
        return *(g.view(*shape[:2], padded, -1)[:, :, : shape[2]] for g, shape in pairs), None, None


def _padded(states: Tensor, width: int) -> Tensor:
    """[rows, heads, own width, size] in memory of its own, with zeros up to `width`."""
    rows, heads, own, size = states.shape
    result = states.new_empty(rows, heads, width, size)
    result[:, :, :own] = states
    result[:, :, own:] = 0
    return result


def _to_rectangle(states: Tensor, rectangle: Rectangle) -> Tensor:
    """[tokens, heads, size] of the rectangle's rows -> [rows, heads, width, size]."""
    own = states if rectangle.gather is None else states.index_select(0, rectangle.gather)
    return own.reshape(rectangle.num_rows, rectangle.width, *own.shape[1:]).transpose(1, 2)


def _causal_mask(width: int, window: int, device: torch.device) -> Tensor:
    """Each token sees itself and the `window` - 1 before it."""
    distance = torch.arange(width, device=device)[:, None] - torch.arange(width, device=device)
    return (distance >= 0) & (distance < window)


def _no_mask(**_: Any) -> None:
    """transformers' mask function: the layout takes the place of the mask."""


@contextmanager
def packed_rows(module: Any) -> Iterator[None]:
    """Within, a module that attends by sdpa attends by `packed_attention`.

    A backward pass belongs inside, too.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(PACKED, packed_attention)
    AttentionMaskInterface.register(PACKED, _no_mask)
    config = module.config.get_text_config()
    before = config._attn_implementation
    if before == "sdpa":
        config._attn_implementation = PACKED
    try:
        yield
    finally:
        config._attn_implementation = before
