"""Sequence parallelism: each rank of a group has some of the packed row's tokens.

    ranks = SequenceRanks(group, num_heads)
    split = ranks.split(reads)              # for a row that is padded to ranks.padded(n) tokens
    output = ranks.attend(query, key, value, sinks, attend)     # in each layer; this rank's tokens
    numbers = split.gather(own_numbers)     # at the positions read on all ranks

A layer computes token by token, except for attention. In attention, one all-to-all gives each rank
all tokens for some of the heads, and a second one gives it all heads for its own tokens (Ulysses,
arXiv 2309.14509). If there are more ranks than heads, keys and values are gathered, and each rank
attends with the queries of its own tokens. Its tokens are then two spans at equal distances from
the beginning and the end of the row, so that all ranks attend to equally many keys (zigzag; Llama
3, arXiv 2407.21783, section 3.3.2).

The gathered outputs, and therefore the loss, are equal on all ranks. In the backward pass, each
rank uses its part of the gradient, so the gradients of weights are partial and must be summed over
the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.errors import ConfigError
from workers.parallel.groups import communicate, exchange

AttendRows = Callable[..., Tensor]
"""(query, key, value, sinks, positions of the queries or None for all) -> output.

Query, key, value and output are [tokens, heads, size]; `sinks` is [heads] or None.
"""


@dataclass(frozen=True)
class SequenceRanks:
    """A group of ranks that share packed rows of a model with `num_heads` query heads."""

    group: dist.ProcessGroup
    num_heads: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size()

    @property
    def gathers(self) -> bool:
        """True if there are more ranks than heads, so that keys and values are gathered."""
        return self.size > self.num_heads

    def padded(self, num_tokens: int) -> int:
        """Round `num_tokens` up to a number that can be split equally over the ranks."""
        multiple = 2 * self.size if self.gathers else self.size
        return -(-num_tokens // multiple) * multiple

    def places(self, num_tokens: int) -> Tensor:
        """Return the positions in the row of each rank's tokens, [ranks, tokens per rank]."""
        if not self.gathers:
            return torch.arange(num_tokens).view(self.size, -1)
        fronts, backs = torch.arange(num_tokens).view(2, self.size, -1)
        return torch.cat([fronts, backs.flip(0)], dim=1)

    def split(self, reads: Tensor) -> Split:
        """Divide the row. `reads` is True for each token of the row at which the head is read."""
        places = self.places(len(reads))
        is_read = reads[places]
        numbers = (reads.cumsum(0) - 1)[places[is_read]]
        rank = self.group.rank()
        counts = is_read.sum(dim=1).tolist()
        return Split(self.group, places[rank], is_read[rank].nonzero()[:, 0], numbers, counts)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, attend: AttendRows
    ) -> Tensor:
        """Return the attention of this rank's tokens; `attend` computes it over whole rows."""
        num_own, num_heads, _ = query.shape
        if self.gathers:
            places = self.places(self.size * num_own)
            order = places.flatten().argsort().to(query.device)
            key, value = (part[order] for part in self._exchanged([key, value], is_whole=True))
            return attend(query, key, value, sinks, places[self.group.rank()])

        if num_heads % self.size:
            raise ConfigError(
                f"parallel.sp={self.size} does not divide the {num_heads} heads of a layer. Set "
                f"parallel.sp to a divisor of {num_heads}."
            )
        repeats = math.lcm(key.shape[1], self.size) // key.shape[1]
        if repeats > 1:
            key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
        states = self._exchanged([query, key, value])
        if sinks is not None:
            sinks = sinks.chunk(self.size)[self.group.rank()]
        output = attend(*states, sinks, None)
        back = exchange(output.unflatten(0, (self.size, -1)), self.group)
        return back.transpose(0, 1).flatten(1, 2)

    def _exchanged(self, states: list[Tensor], is_whole: bool = False) -> list[Tensor]:
        """Exchange [own tokens, heads, size] for [all tokens, own heads, size], in one collective.

        With `is_whole`, every rank gets all heads.
        """
        parts = [state.unflatten(1, (1 if is_whole else self.size, -1)) for state in states]
        flat = torch.cat([part.flatten(2) for part in parts], dim=2).transpose(0, 1)
        if is_whole:
            flat = flat.expand(self.size, -1, -1)
        arrived = exchange(flat, self.group)
        shapes = [part.shape[2:] for part in parts]
        chunks = arrived.flatten(0, 1).split([math.prod(shape) for shape in shapes], dim=1)
        return [chunk.unflatten(1, shape) for chunk, shape in zip(chunks, shapes, strict=True)]


@dataclass(frozen=True)
class Split:
    """One packed row, divided over the ranks of a group."""

    group: dist.ProcessGroup
    places: Tensor
    """Positions of this rank's tokens in the row."""
    reads: Tensor
    """Indices, among this rank's tokens, of those at which the head is read."""
    numbers: Tensor
    """For each position read, rank by rank: its index among the positions read of the row."""
    counts: list[int]
    """Number of positions that each rank reads."""

    def local_part(self, column: Tensor) -> Tensor:
        """Select this rank's part of a column with one number per position read."""
        rank = self.group.rank()
        return column[self.numbers.split(self.counts)[rank].to(column.device)]

    def gather(self, column: Tensor) -> Tensor:
        """Gather [own positions read, ...] to [positions read, ...] in the order of the row."""
        gathered = communicate(
            column, self._all_rows, lambda grad: grad.split(self.counts)[self.group.rank()]
        )
        return gathered[self.numbers.argsort().to(column.device)]

    def _all_rows(self, rows: Tensor) -> Tensor:
        padded = rows.new_zeros(max(1, *self.counts), *rows.shape[1:])
        padded[: len(rows)] = rows
        parts = [torch.empty_like(padded) for _ in self.counts]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:count] for part, count in zip(parts, self.counts, strict=True)])

    def add_up(self, share: Tensor) -> Tensor:
        """Return the sum of the ranks' contributions; only this rank's has a gradient."""
        total = share.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total + (share - share.detach())
