"""Attention over rows that are concatenated into one packed row, without padding.

`passes/packing.py` builds a `RowLayout` and passes it to the forward method of the module as
`row_layout`; transformers forwards it to the attention function.

A packed row needs a mask that separates its rows. The size of a dense mask is the square of the
number of tokens. FlashAttention takes the boundaries of the rows instead
(`passes/varlen.py`). If FlashAttention is not available, or does not support a model's
soft-capping, rows of similar length are padded on the right and computed as one rectangular batch
(`Rectangle`). Causal attention needs no mask there, because the padding comes after all real tokens
of its row. The time therefore depends on the number of real tokens, on every device.

Rows that share a prefix, such as samples of one prompt, can share its tokens: all layers compute it
once (`passes/packing.py`). FlashAttention then gets rows with more keys than queries, and
only keys and values are copied to every row. Rectangles hold copies of all states, because they
need equally many queries and keys.

If several ranks share the tokens of a row (`workers.parallel.sequence`), the layout describes the
whole row and includes the group of ranks, and the attention of every layer communicates within this
group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from workers.models.attention import has_sinks, override_attention, soft_cap
from workers.parallel.offload import to_device

if TYPE_CHECKING:
    from workers.parallel.sequence import SequenceRanks

PACKED = "row_layout_sdpa"
"""Name of `packed_attention` in the attention interface of transformers."""
Attend = Callable[..., Tensor]
"""(query, key, value, bounds, key bounds, longest, most keys; scale, left, cap) -> output.

Query, key, value and output are [tokens, heads, size]; there may be fewer key heads than query
heads. `bounds` are the starts of the rows' queries and the end of the last row; `longest` is the
largest number of queries of a row. The queries of a row are its last tokens. A token attends to
itself and to the `left` tokens before it, or to all tokens before it if `left` is -1. Scores are
soft-capped at `cap`; 0 means no cap.
"""
LARGEST_HEAD = 256
"""Largest head size that FlashAttention supports. Head sizes must also be multiples of 8."""


@dataclass(frozen=True)
class LocalMask:
    """Replaces the mask of a layer in which a token sees only some of the tokens before it.

    A window ends at the attending token. Chunks are counted from the first token of the row.
    """

    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class Rectangle:
    """Neighboring rows of a packed row, `num_tokens` in total, each padded to `width` tokens."""

    num_tokens: int
    num_rows: int
    width: int
    gather: Tensor | None
    """Index of the token at each position of the rectangle; None without padding."""
    scatter: Tensor | None
    """Position of each token in the rectangle; None without padding."""

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Rectangle:
        """Return the rectangle of rows of these lengths."""
        width, num_tokens = max(lengths), sum(lengths)
        if num_tokens == width * len(lengths):
            return cls(num_tokens, len(lengths), width, None, None)

        real = torch.arange(width) < torch.tensor(lengths)[:, None]
        gather = torch.zeros(real.shape, dtype=torch.long)
        gather.masked_scatter_(real, torch.arange(num_tokens))
        scatter = real.flatten().nonzero().squeeze(1)
        places = (to_device(place, device) for place in (gather.flatten(), scatter))
        return cls(num_tokens, len(lengths), width, *places)


class RowLayout:
    """Positions of the rows in a packed row, as bounds or as rectangles, computed lazily.

    With `shared`, the first `shared[i]` tokens of row i are computed as those of the row before it.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        ranks: SequenceRanks | None = None,
        shared: Sequence[int] | None = None,
    ) -> None:
        self.lengths, self.device, self.ranks, self.shared = lengths, device, ranks, shared

    @cached_property
    def queries(self) -> list[int]:
        """Number of tokens that are computed for each row."""
        if self.shared is None:
            return [*self.lengths]
        return [length - first for length, first in zip(self.lengths, self.shared, strict=True)]

    @cached_property
    def numbers(self) -> list[Tensor]:
        """For each row, the numbers of its tokens among the computed ones."""
        rows = [*torch.arange(sum(self.queries)).split(self.queries)]
        for row, first in enumerate(self.shared or ()):
            if first:
                rows[row] = torch.cat([rows[row - 1][:first], rows[row]])
        return rows

    @cached_property
    def sources(self) -> Tensor:
        """For each token of the rows, its number among the computed tokens."""
        return to_device(torch.cat(self.numbers), self.device)

    @cached_property
    def bounds(self) -> Tensor:
        """Start of the queries of each row, and end of the last, [rows + 1]."""
        return _bounds(self.queries, self.device)

    @cached_property
    def key_bounds(self) -> Tensor:
        """Start of the keys of each row, and end of the last, [rows + 1]."""
        return _bounds(self.lengths, self.device) if self.shared else self.bounds

    @cached_property
    def copied(self) -> tuple[RowLayout, Tensor, Tensor]:
        """Whole rows, the longest first, for rectangles of similar rows.

        Returns their layout; for each of their tokens its number among the computed tokens; and for
        each computed token its position in the row that it was computed for.
        """
        assert self.shared is not None, "without shared prefixes, nothing is copied"
        order = sorted(range(len(self.lengths)), key=lambda row: -self.lengths[row])
        sources = torch.cat([self.numbers[row] for row in order])
        is_computed = [torch.arange(self.lengths[row]) >= self.shared[row] for row in order]
        places = torch.cat(is_computed).nonzero().squeeze(1)
        results = torch.empty_like(places)
        results[sources[places]] = places
        layout = RowLayout([self.lengths[row] for row in order], self.device)
        return layout, to_device(sources, self.device), to_device(results, self.device)

    @cached_property
    def rectangles(self) -> list[Rectangle]:
        """Rectangles of neighboring rows, in the order of the rows.

        Of each row, at most 8 tokens or a fifth of the width, whichever is more, are padding.
        """
        rectangles: list[Rectangle] = []
        lengths = self.lengths
        first, shortest, longest = 0, lengths[0], lengths[0]
        for row, length in enumerate(lengths):
            low, high = min(shortest, length), max(longest, length)
            if high > max(1.25 * low, low + 8):
                rectangles.append(Rectangle.of(lengths[first:row], self.device))
                first, low, high = row, length, length
            shortest, longest = low, high
        return [*rectangles, Rectangle.of(lengths[first:], self.device)]


def _bounds(lengths: Sequence[int], device: torch.device) -> Tensor:
    return to_device(torch.tensor([0, *lengths]).cumsum(dim=0, dtype=torch.int32), device)


class _WholeRows(torch.autograd.Function):
    """Copy the computed states [tokens, heads, size] to all tokens of the rows.

    The gradient of a shared token is a sum over its rows, the last row first, so it has the same
    bits in every run. Indexing would sort the tokens on a GPU, or add them up in any order.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, layout: RowLayout) -> Tensor:
        ctx.layout = layout
        return states.index_select(0, layout.sources)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        layout: RowLayout = ctx.layout
        rows = zip(grad.split(list(layout.lengths)), layout.shared or (), strict=True)
        parts: list[Tensor] = []
        later = grad[:0].to(torch.promote_types(grad.dtype, torch.float32))
        for row, first in [*rows][::-1]:
            # `later` has the gradients of this row's first tokens from the rows after it
            count = len(later)
            later = later + row[:count]
            of_computed = row[max(first, count) :]
            if count > first:
                of_computed = torch.cat([later[first:].to(grad.dtype), of_computed])
            parts.append(of_computed)
            later = later[:first]
            if first > count:
                later = torch.cat([later, row[count:first].to(later.dtype)])
        return torch.cat(parts[::-1]), None


@dataclass(frozen=True)
class VarlenKernel:
    """A library's attention function for packed rows, called in a 16-bit dtype."""

    name: str
    attend: Attend
    dtype: torch.dtype
    has_softcap: bool = False

    def takes(self, query: Tensor, softcap: float | None) -> bool:
        """True if the kernel supports these heads, and the soft cap if there is one."""
        return query.shape[-1] <= LARGEST_HEAD and (self.has_softcap or softcap is None)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: RowLayout,
        *,
        scaling: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Return the causal attention of each row, [tokens, heads, size of a value].

        A token sees itself and the `window` - 1 tokens before it.
        """
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        size = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
        states = [part.to(self.dtype) for part in (query, key, value)]
        for number, part in enumerate(states):
            # call `pad` only if it is needed, because it always copies
            if missing := size - part.shape[-1]:
                states[number] = pad(part, (0, missing))
        longest, most_keys = max(layout.queries), max(layout.lengths)
        left = -1 if window is None or window >= most_keys else window - 1
        rows = layout.bounds, layout.key_bounds, longest, most_keys
        output = self.attend(*states, *rows, scale=scale, left=left, cap=softcap or 0.0)
        return output[..., : value.shape[-1]].to(value.dtype)


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: LocalMask | None,
    scaling: float | None = None,
    row_layout: RowLayout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    kernel: VarlenKernel | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: each row by itself, by `kernel` or in rectangles.

    [1, heads, tokens, size] -> [1, tokens, heads, size]. The window of the layer comes from its
    mask, as with sdpa: some models do not pass it as an argument. `s_aux` has the attention sink of
    each head.
    """
    if row_layout is None:
        raise TypeError(f"{type(module).__name__} did not receive the layout of the packed row")
    if attention_mask is None:
        local = LocalMask(sliding_window)
    elif isinstance(attention_mask, LocalMask):
        local = attention_mask
    else:
        raise TypeError(f"{type(module).__name__} builds its own attention mask")

    query, key, value = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    is_plain = s_aux is None and local.chunk is None
    if kernel is not None and not (is_plain and kernel.takes(query, softcap)):
        kernel = None
    results: Tensor | None = None
    if row_layout.shared is not None and kernel is not None:
        key, value = (_WholeRows.apply(states, row_layout) for states in (key, value))  # type: ignore[no-untyped-call]
    elif row_layout.shared is not None:
        row_layout, sources, results = row_layout.copied
        query, key, value = (states.index_select(0, sources) for states in (query, key, value))

    attend: Callable[..., Tensor] = _LayerAttention(row_layout, kernel, scaling, local, softcap)
    if row_layout.ranks is not None:
        output = row_layout.ranks.attend(query, key, value, s_aux, attend)
    else:
        output = attend(query, key, value, s_aux, None)
    if results is not None:
        output = output.index_select(0, results)
    return output.unsqueeze(0), None  # contiguous, because some models take a view of it


@dataclass(frozen=True)
class _LayerAttention:
    """The attention of a layer over the rows of a packed row."""

    layout: RowLayout
    kernel: VarlenKernel | None
    """A kernel that has all features of the layer, or None."""
    scale: float | None
    local: LocalMask
    softcap: float | None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, places: Tensor | None
    ) -> Tensor:
        """Return [tokens, heads, size] for all rows, or for the tokens at `places` (ascending)."""
        if places is not None:
            return self._attend_at(query, key, value, sinks, places)
        if self.kernel is not None:
            return self.kernel(
                query,
                key,
                value,
                self.layout,
                scaling=self.scale,
                window=self.local.window,
                softcap=self.softcap,
            )

        rectangles = self.layout.rectangles
        sizes = [rectangle.num_tokens for rectangle in rectangles]
        states = (part.split(sizes) for part in (query, key, value))
        outputs = [
            self._attend_rectangle(rectangle, query, key, value, sinks)
            for rectangle, query, key, value in zip(rectangles, *states, strict=True)
        ]
        return outputs[0].contiguous() if len(outputs) == 1 else torch.cat(outputs)

    def _attend_at(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, places: Tensor
    ) -> Tensor:
        """Attend from the queries at `places` to the keys of their rows.

        Returns [places, heads, size]. `key` and `value` have every position of the rows. If
        `places` has two separate spans of a row, each span is computed separately.
        """
        ends = torch.tensor(self.layout.lengths).cumsum(0)
        rows = torch.bucketize(places, ends, right=True)
        borders = ((places.diff() != 1) | (rows.diff() != 0)).nonzero()[:, 0] + 1
        outputs, done = [], 0
        for places_here, row in zip(
            places.tensor_split(borders), rows.tensor_split(borders), strict=True
        ):
            begin = int(ends[row[0]]) - self.layout.lengths[int(row[0])]
            end, here = int(places_here[-1]) + 1, slice(done, done + len(places_here))
            queries, keys, values = (
                part.transpose(0, 1)[None]
                for part in (query[here], key[begin:end], value[begin:end])
            )
            output = self._causal(queries, keys, values, sinks)
            outputs.append(output.squeeze(0).transpose(0, 1))
            done += len(places_here)
        return torch.cat(outputs)

    def _attend_rectangle(
        self,
        rectangle: Rectangle,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return [tokens, heads, size] for the rows of the rectangle."""
        shaped = []  # [rows, heads, width, size]
        for states in (query, key, value):
            if rectangle.gather is not None:
                states = states.index_select(0, rectangle.gather)
            rows = states.reshape(rectangle.num_rows, rectangle.width, *states.shape[1:])
            shaped.append(rows.transpose(1, 2))
        queries, keys, values = shaped
        output = self._causal(queries, keys, values, sinks)
        flat = output.transpose(1, 2).reshape(-1, *output.shape[1::2])
        return flat if rectangle.scatter is None else flat.index_select(0, rectangle.scatter)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Return causal attention [rows, heads, tokens, size]; queries are the last positions."""
        (num_queries, width), local = (query.shape[2], key.shape[2]), self.local
        is_local = min(local.window or width, local.chunk or width) < width
        dtype = value.dtype
        if query.device.type == "cpu" and dtype == torch.bfloat16:
            # bfloat16 attention kernels are slower than float32 ones on a CPU
            query, key, value = query.float(), key.float(), value.float()
        if self.softcap is not None or sinks is not None:
            mask = _causal_mask(num_queries, width, local, query.device)
            output = eager_attention(query, key, value, mask, self.scale, self.softcap, sinks)
            return output.to(dtype)
        needs_mask = is_local or num_queries < width
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=_causal_mask(num_queries, width, local, query.device) if needs_mask else None,
            is_causal=not needs_mask,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        ).to(dtype)


def eager_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention by matrix products with float32 scores, for features that sdpa lacks.

    With `softcap`, tanh bounds the scores. With `sinks`, each head has a sink, which takes part in
    every softmax and contributes no value.
    Queries, keys and values are [rows, heads, tokens, size].
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    scores = (query @ key.transpose(2, 3)).float()
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(len(scores), -1, scores.shape[2], 1)
        probs = torch.cat([scores, column], dim=3).softmax(dim=-1)[..., :-1]
    else:
        probs = scores.softmax(dim=-1)
    return probs.to(value.dtype) @ value


def _causal_mask(num_queries: int, width: int, local: LocalMask, device: torch.device) -> Tensor:
    """Return a mask that limits each of the last tokens to its window or chunk."""
    places = torch.arange(width, device=device)
    queries = places[width - num_queries :, None]
    distance = queries - places
    mask = (distance >= 0) & (distance < (local.window or width))
    if local.chunk is not None:
        mask &= queries // local.chunk == places // local.chunk
    return mask


def _local_mask(
    *, config: Any, local_size: int | None = None, use_vmap: bool = False, **_: Any
) -> LocalMask | None:
    """Mask function for transformers that keeps only windows and chunks."""
    if use_vmap:
        raise TypeError("it builds its mask with a custom function")
    if local_size is None:
        return None
    chunk = getattr(config, "attention_chunk_size", None)
    window = getattr(config, "sliding_window", None)
    if chunk == window:
        raise TypeError(
            f"attention_chunk_size and sliding_window are both {chunk} in its configuration, so a "
            "layer's mask does not show whether it uses a chunk or a window"
        )
    return LocalMask(chunk=chunk) if local_size == chunk else LocalMask(window=local_size)


def takes_layout(module: Any) -> bool:
    """True if packed rows use `packed_attention`: with sdpa, or eager if sdpa lacks a feature."""
    built_with = module.config.get_text_config()._attn_implementation
    return built_with == "sdpa" or (built_with == "eager" and bool(_beyond_sdpa(module)))


def _beyond_sdpa(module: Any) -> str:
    """Return the feature that this model needs and sdpa lacks, or ""."""
    if soft_cap(module.config) is not None:
        return "soft-capping"
    return "sinks" if has_sinks(module) else ""


def packed_rows(
    module: Any, kernel: VarlenKernel | None = None, compiled: bool = False
) -> AbstractContextManager[None]:
    """Return a context in which the module attends within rows that are packed, with this kernel.

    Run the backward pass inside, too. Attention stays outside the graphs of `compiled` layers.
    """
    if not takes_layout(module):
        return nullcontext()
    return override_attention(module, PACKED, _attention_by(kernel, compiled), _local_mask)


@cache
def _attention_by(kernel: VarlenKernel | None, compiled: bool) -> Callable[..., Any]:
    """Return one function object per kernel: a new one would recompile compiled layers."""
    attention: Callable[..., Any] = partial(packed_attention, kernel=kernel)
    if compiled:  # no compiled graph includes attention
        attention = torch.compiler.disable(attention)
    return attention


def describe(module: Any, packs: bool, kernel: VarlenKernel | None, why_not: str) -> str:
    """Describe in one line how an engine computes attention; `why_not` is added in parentheses."""
    config = module.config.get_text_config()
    built_with, beyond = config._attn_implementation, _beyond_sdpa(module)
    if not packs:
        text = f"{built_with} on padded rows"
    elif not takes_layout(module):
        text = f"packed rows by {built_with}, whose memory and time grow with the square of a pass"
    elif kernel is not None and beyond != "sinks" and (kernel.has_softcap or not beyond):
        text = f"packed rows by {kernel.name}, which reads the bounds of rows"
    else:
        by = f"matrix products with {beyond}" if beyond else "sdpa"
        text = f"packed rows by {by}, in rectangles of rows of similar length"
    return f"attention of {config.model_type}: {text}{f' ({why_not})' if why_not else ''}."
