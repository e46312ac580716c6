"""Attention over rows that are laid end to end as one packed row, without padding.

`workers.training.packing` builds a `RowLayout` and passes it to the module's forward under the name
`row_layout`, which transformers hands on to the attention function.

A packed row needs a mask that keeps its rows apart. A dense one costs the square of all tokens.
FlashAttention takes the rows' bounds instead (`workers.training.varlen`). Where it does not run, or
leaves out the soft cap of a model's scores, rows of like length are laid as the rows of a
rectangle, padded on the right: causal attention needs no mask then, since the padding comes after
all that is real in its row. So time follows the real tokens, on every device.

Where ranks share the tokens of a row (`workers.parallel.sequence`), the layout is that of the whole
row and knows the ranks, and every layer attends through them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from workers.models.attention import attending_by, has_sinks, soft_cap
from workers.parallel.page_lock import to_device
from workers.parallel.sequence import SequenceRanks

PACKED = "row_layout_sdpa"
"""Name of `packed_attention` in transformers' interface."""
Attend = Callable[..., Tensor]
"""(query, key, value, bounds, bounds, longest, longest; scale, left, cap) -> output.

States are [tokens, heads, size]; there may be fewer heads of keys than of queries. `bounds` are
where rows begin and the last one ends, `longest` the tokens of the longest; a token sees `left` to
its left, or all of its row (-1); scores are capped at `cap`, or not (0).
"""
LARGEST_HEAD = 256
"""Sizes that FlashAttention takes: up to here, in steps of 8."""


@dataclass(frozen=True)
class LocalMask:
    """What a packed row's layer gets in the place of a mask, where a token does not see all before.

    A window ends at the token; chunks are counted from the row's first token.
    """

    window: int | None = None
    chunk: int | None = None


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
    """Where the rows of a packed row are, by bounds or by rectangles; made when first asked for."""

    def __init__(
        self, lengths: Sequence[int], device: torch.device, ranks: SequenceRanks | None = None
    ) -> None:
        self.lengths, self.device, self.ranks = lengths, device, ranks

    @cached_property
    def rectangles(self) -> list[Rectangle]:
        """Rectangles of neighbouring rows, in the order of the rows."""
        runs = _runs(self.lengths)
        return [_rectangle(self.lengths[first:last], self.device) for first, last in runs]

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """[rows + 1]: where each row begins, and the last ends."""
        ends = torch.tensor([0, *self.lengths]).cumsum(dim=0, dtype=torch.int32)
        return to_device(ends, self.device)

    @property
    def max_len(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths)


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
    places = (to_device(one, device) for one in (gather.flatten(), scatter))
    return Rectangle(num_tokens, len(own), width, *places)


@dataclass(frozen=True)
class VarlenKernel:
    """A library's function for rows of any lengths, of one 16-bit type."""

    name: str
    attend: Attend
    dtype: torch.dtype
    has_softcap: bool = False

    def takes(self, query: Tensor, softcap: float | None) -> bool:
        """Whether heads are small enough, and scores capped only where it can do that."""
        return query.shape[-1] <= LARGEST_HEAD and (self.has_softcap or softcap is None)

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bounds: Tensor,
        longest: int,
        *,
        scaling: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Causal attention of each row, [tokens, heads, size of a value].

        A token sees itself and the `window` - 1 before it.
        """
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        size = -(-max(query.shape[-1], value.shape[-1]) // 8) * 8
        states = (_padded(part.to(self.dtype), size) for part in (query, key, value))
        left = -1 if window is None or window >= longest else window - 1
        rows = bounds, bounds, longest, longest
        output = self.attend(*states, *rows, scale=scale, left=left, cap=softcap or 0.0)
        return output[..., : value.shape[-1]].to(value.dtype)


def _padded(states: Tensor, size: int) -> Tensor:
    """Heads of this size; `pad` would copy what has it already."""
    missing = size - states.shape[-1]
    return pad(states, (0, missing)) if missing else states


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
    """transformers' attention function, each row by itself: by `kernel`, or rectangle by rectangle.

    [1, heads, tokens, size] -> [1, tokens, heads, size]. The layer's window is that of its mask, as
    under sdpa: some models do not name it among the arguments. `s_aux` are sinks of the heads.
    """
    if row_layout is None:
        raise TypeError(f"{type(module).__name__} was not given the packed row's layout")
    if attention_mask is None:
        local = LocalMask(sliding_window)
    elif isinstance(attention_mask, LocalMask):
        local = attention_mask
    else:
        raise TypeError(f"{type(module).__name__} makes a mask of its own")

    query, key, value = (states.squeeze(0).transpose(0, 1) for states in (query, key, value))
    how = _Scores(scaling, local, softcap)
    attend = partial(_attend_rows, layout=row_layout, how=how, kernel=kernel)
    if row_layout.ranks is not None:
        output = row_layout.ranks.attend(query, key, value, s_aux, attend)
    else:
        output = attend(query, key, value, s_aux, None)
    return output.unsqueeze(0), None  # contiguous, as some models take a view of it


@dataclass(frozen=True)
class _Scores:
    """How a layer makes scores."""

    scale: float | None
    local: LocalMask
    softcap: float | None


def _attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    places: Tensor | None,
    *,
    layout: RowLayout,
    how: _Scores,
    kernel: VarlenKernel | None,
) -> Tensor:
    """[tokens, heads, size] of all rows, or of the tokens at these `places`, in rising order."""
    if places is not None:
        return _attend_places(query, key, value, sinks, places, layout, how)
    is_plain = sinks is None and how.local.chunk is None
    if kernel is not None and kernel.takes(query, how.softcap) and is_plain:
        rows = layout.cu_seqlens, layout.max_len
        settings: Any = {"scaling": how.scale, "window": how.local.window, "softcap": how.softcap}
        return kernel(query, key, value, *rows, **settings)

    rectangles = layout.rectangles
    sizes = [rectangle.num_tokens for rectangle in rectangles]
    parts = zip(rectangles, query.split(sizes), key.split(sizes), value.split(sizes), strict=True)
    pieces = [_attend(*part, sinks, how) for part in parts]
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)


def _attend_places(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    places: Tensor,
    layout: RowLayout,
    how: _Scores,
) -> Tensor:
    """[places, heads, size]: a row's queries that are here beside its keys up to the last of them.

    There are keys of every place. Of a row that has two pieces here, each is by itself.
    """
    ends = torch.tensor(layout.lengths).cumsum(0)
    rows = torch.bucketize(places, ends, right=True)
    borders = ((places.diff() != 1) | (rows.diff() != 0)).nonzero()[:, 0] + 1
    pieces, done = [], 0
    for places_here, row in zip(
        places.tensor_split(borders), rows.tensor_split(borders), strict=True
    ):
        begin = int(ends[row[0]]) - layout.lengths[int(row[0])]
        end, here = int(places_here[-1]) + 1, slice(done, done + len(places_here))
        own = (
            part.transpose(0, 1)[None] for part in (query[here], key[begin:end], value[begin:end])
        )
        pieces.append(_attention(*own, sinks, how).squeeze(0).transpose(0, 1))
        done += len(places_here)
    return torch.cat(pieces)


def _attend(
    rectangle: Rectangle,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    how: _Scores,
) -> Tensor:
    """[tokens, heads, size] of the rectangle's rows."""
    own = (_to_rectangle(states, rectangle) for states in (query, key, value))
    output = _attention(*own, sinks, how)
    flat = output.transpose(1, 2).reshape(-1, *output.shape[1::2])
    return flat if rectangle.scatter is None else flat.index_select(0, rectangle.scatter)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, how: _Scores
) -> Tensor:
    """Causal attention of [rows, heads, tokens, size], the queries being those of the last keys."""
    (num_queries, width), local = (query.shape[2], key.shape[2]), how.local
    is_local = min(local.window or width, local.chunk or width) < width
    dtype = value.dtype
    if query.device.type == "cpu" and dtype == torch.bfloat16:
        # bfloat16 kernels are the slower ones there
        query, key, value = query.float(), key.float(), value.float()
    if how.softcap is not None or sinks is not None:
        mask = _causal_mask(num_queries, width, local, query.device)
        return written_out_attention(query, key, value, mask, how.scale, how.softcap, sinks).to(
            dtype
        )
    needs_mask = is_local or num_queries < width
    return scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=_causal_mask(num_queries, width, local, query.device) if needs_mask else None,
        is_causal=not needs_mask,
        scale=how.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    ).to(dtype)


def written_out_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention as matrix products, for what torch's fused attention has not; float32 scores.

    Scores are bounded by tanh, or each head has a sink, which takes its share of every softmax and
    gives nothing. States are [rows, heads, tokens, size].
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


def _to_rectangle(states: Tensor, rectangle: Rectangle) -> Tensor:
    """[tokens, heads, size] of the rectangle's rows -> [rows, heads, width, size]."""
    own = states if rectangle.gather is None else states.index_select(0, rectangle.gather)
    return own.reshape(rectangle.num_rows, rectangle.width, *own.shape[1:]).transpose(1, 2)


def _causal_mask(num_queries: int, width: int, local: LocalMask, device: torch.device) -> Tensor:
    """Each of a row's last tokens sees itself and those before it in its window or chunk."""
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
    """transformers' mask function: the layout takes the place of the mask, but for its locality."""
    if use_vmap:
        raise TypeError("its mask is a function of its own")
    if local_size is None:
        return None
    chunk = getattr(config, "attention_chunk_size", None)
    window = getattr(config, "sliding_window", None)
    if chunk == window:
        raise TypeError(f"its chunks and its window are both of {chunk} tokens")
    return LocalMask(chunk=chunk) if local_size == chunk else LocalMask(window=local_size)


def takes_layout(module: Any) -> bool:
    """Whether packed rows go to `packed_attention`: under sdpa, or eager for what sdpa lacks."""
    built_with = module.config.get_text_config()._attn_implementation
    return built_with == "sdpa" or (built_with == "eager" and bool(_beyond_sdpa(module)))


def _beyond_sdpa(module: Any) -> str:
    """What `packed_attention` writes out as matrix products for this model."""
    if soft_cap(module.config) is not None:
        return "soft-capping"
    return "sinks" if has_sinks(module) else ""


def packed_rows(
    module: Any, kernel: VarlenKernel | None = None, compiled: bool = False
) -> AbstractContextManager[None]:
    """Within, a module that `takes_layout` attends by `packed_attention`, with this kernel.

    A backward pass belongs inside, too. Of `compiled` layers it is no part.
    """
    if not takes_layout(module):
        return nullcontext()
    return attending_by(module, PACKED, _attention_by(kernel, compiled), _local_mask)


def outside_of_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which no compiled graph takes in."""
    disabled: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return disabled


@cache
def _attention_by(kernel: VarlenKernel | None, compiled: bool) -> Callable[..., Any]:
    """One function for each kernel: compiled layers would be compiled again for another."""
    attention = partial(packed_attention, kernel=kernel)
    return outside_of_graphs(attention) if compiled else attention


def describe(module: Any, packs: bool, kernel: VarlenKernel | None, why_not: str) -> str:
    """A line on what computes the attention of a training engine's rows."""
    config = module.config.get_text_config()
    built_with, beyond = config._attn_implementation, _beyond_sdpa(module)
    if not packs:
        how = f"{built_with} on padded rows"
    elif not takes_layout(module):
        how = f"packed rows by {built_with}, whose memory and time grow with the square of a pass"
    elif kernel is not None and beyond != "sinks" and (kernel.has_softcap or not beyond):
        how = f"packed rows by {kernel.name}, by their bounds"
    else:
        by = f"matrix products with {beyond}" if beyond else "sdpa"
        how = f"packed rows by {by}, in rectangles of rows of like length"
    return f"attention of {config.model_type}: {how}{f' ({why_not})' if why_not else ''}."
