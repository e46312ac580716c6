"""Compute only once a prefix that several rows of a pass share.

Samples of one prompt begin with the same tokens, and so do the two sides of a pair, or trajectories
with one system prompt. If attention is the only operation that mixes tokens, equal prefixes have
equal hidden states, so layers compute them once. Attention sees a copy in every row, and the
gradients of the copies add up. A token at which the head is read is never shared.

    order = prefix_order(ids, reads, lengths)           # equal prefixes are neighbors
    shared = share_prefixes(tokens, lengths, device)    # what a pass computes, and its layout
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from verl_like.batch.ragged import RaggedTensor
from workers.columns import IMAGES, ROUTED
from workers.training.passes.attention import RowLayout

COST_OF_COPY = 0.25
"""Cost of a copy of a shared token, in tokens of the budget: attention stores its states."""
SMALLEST_SHARE = 0.1
"""Prefixes are shared if that saves more than this fraction of the tokens; copying costs 2 %."""


class SharedPrefixes(NamedTuple):
    """Tokens that a pass computes, and the layout of its rows."""

    computed: Tensor
    """True for tokens of the rows that are computed; the others are copies."""
    layout: RowLayout


class PrefixOrder(NamedTuple):
    """An order in which rows with equal prefixes are neighbors."""

    rows: list[int]
    shared: list[int]
    """Number of tokens that each row, in this order, shares with the row before it."""


def prefix_order(
    ids: RaggedTensor, reads: RaggedTensor, lengths: Sequence[int]
) -> PrefixOrder | None:
    """Return an order in which rows share prefixes; None if they share little."""
    rows = [row[:length, None] for row, length in zip(ids.rows(), lengths, strict=True)]
    words, starts = ids.values.numpy().astype(">u4"), ids.lengths.cumsum(0) - ids.lengths
    spans = zip(starts.tolist(), lengths, strict=True)
    texts = [words[start : start + length].tobytes() for start, length in spans]
    order, marks = sorted(range(len(rows)), key=texts.__getitem__), reads.rows()
    shared = shared_lengths([rows[row] for row in order], [marks[row] for row in order])
    return PrefixOrder(order, shared) if sum(shared) > SMALLEST_SHARE * sum(lengths) else None


def shared_lengths(rows: Sequence[Tensor], reads: Sequence[Tensor]) -> list[int]:
    """Return how many tokens each row shares with the previous row, up to the first token read.

    Rows are [tokens, numbers]; two tokens are equal if all their numbers are.
    """
    lengths = [0]
    for before, row, read in zip(rows, rows[1:], reads[1:], strict=False):
        size = min(len(before), len(row))
        unequal = ((before[:size] != row[:size]).any(dim=1) | read[:size]).numpy()
        lengths.append(int(unequal.argmax()) if unequal.any() else size)
    return lengths


def share_prefixes(
    tokens: dict[str, Tensor], lengths: Sequence[int], device: torch.device
) -> SharedPrefixes | None:
    """Return how a pass over these rows shares the prefixes of neighbors; None if it does not pay
    off.

    `tokens` has the columns input_ids, position_ids and reads of all rows, concatenated. If rows
    name the experts or the images of their tokens, these must be equal, too.
    """
    places = torch.cat([torch.arange(length) for length in lengths])
    if len(lengths) < 2 or not torch.equal(tokens["position_ids"], places):
        return None
    compared = tokens["input_ids"][:, None]
    for name in (ROUTED, IMAGES):
        if name in tokens:
            compared = torch.cat([compared, tokens[name].flatten(1)], dim=1)
    rows, reads = (column.split(list(lengths)) for column in (compared, tokens["reads"]))
    shared = shared_lengths(rows, reads)
    if sum(shared) <= SMALLEST_SHARE * sum(lengths):
        return None

    computed = torch.cat(
        [torch.arange(length) >= first for length, first in zip(lengths, shared, strict=True)]
    )
    return SharedPrefixes(computed, RowLayout(lengths, device, shared=shared))
