"""Locate the shards of a DTensor in the whole tensor, and reassemble it.

Tensor parallelism splits a weight first, over the last axis of the mesh. FSDP2 then splits the
result, usually its rows; a second split of the same dimension is marked as a `_StridedShard`. A
packed weight is a concatenation of several weights, each of which is split separately. torch's
rules support neither packed weights nor uneven rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

Gather = Callable[[Tensor, int, dist.ProcessGroup], Tensor | None]
"""(this rank's rows, number of rows on all ranks, their group) -> all rows, or None on ranks that
do not get them.
"""


Slices = tuple[slice, ...]


@dataclass(frozen=True)
class AxisSplit:
    """One axis of a mesh over which a dimension is split."""

    axis: int
    dim: int
    packed: int
    """Number of weights that are concatenated along the dimension; each of them is split."""
    num_ranks: int

    def part(self, ranges: Sequence[range], rank: int) -> list[range]:
        """Return a rank's part of concatenated ranges; the last ranks may get less, or nothing."""
        size = sum(map(len, ranges)) // self.packed
        most = -(-size // self.num_ranks)
        begin, end = min(rank * most, size), min((rank + 1) * most, size)
        part: list[range] = []
        for block in range(self.packed):
            part += _between(ranges, block * size + begin, block * size + end)
        return part

    def as_rows(self, tensor: Tensor) -> Tensor:
        """Return the tensor with the split dimension first and its packed weights side by side."""
        size = tensor.shape[self.dim] // self.packed
        rows: Tensor = tensor.unflatten(self.dim, (self.packed, size)).movedim(self.dim + 1, 0)
        return rows

    def undo_rows(self, rows: Tensor) -> Tensor:
        """Undo `as_rows`."""
        return rows.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 1).contiguous()


def _between(ranges: Sequence[range], begin: int, end: int) -> list[range]:
    between, start = [], 0
    for span in ranges:
        overlap = span[max(begin - start, 0) : max(end - start, 0)]
        between += [overlap] if overlap else []
        start += len(span)
    return between


def cuts_of(tensor: DTensor) -> list[AxisSplit]:
    """Return the splits of a tensor, in the order in which they are applied."""
    mesh, placements = tensor.device_mesh, tensor.placements
    cuts, last = [], []
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        dim, factor = _dim_of(placement), getattr(placement, "split_factor", 1)
        assert dim is not None, f"{placement} is no weight's"
        later = [n for n in range(axis + 1, mesh.ndim) if _dim_of(placements[n]) == dim]
        if later and factor == math.prod(mesh.size(n) for n in later):
            last.append(AxisSplit(axis, dim, 1, mesh.size(axis)))
        else:
            cuts.append(AxisSplit(axis, dim, factor, mesh.size(axis)))
    return cuts + last[::-1]


def _dim_of(placement: Placement) -> int | None:
    dim: int | None = getattr(placement, "dim", None)
    return dim


def local_ranges(tensor: DTensor, num_splits: int | None = None) -> list[list[range]]:
    """Return, per dimension, the ranges of the whole tensor that form this rank's part.

    `num_splits` applies only the first splits; None applies all.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank holds tensors of its own mesh only"
    ranges = [[range(size)] for size in tensor.shape]
    for cut in cuts_of(tensor)[:num_splits]:
        ranges[cut.dim] = cut.part(ranges[cut.dim], coordinate[cut.axis])
    return ranges


@dataclass(frozen=True)
class ShardSlice:
    """A contiguous part of a tensor: its position in the rank's shard and in the whole tensor."""

    local: Slices
    place: tuple[range, ...]

    @classmethod
    def at(cls, begins: Sequence[int], sizes: Sequence[int]) -> ShardSlice:
        """Return a slice with these sizes that begins at `begins` in the whole tensor."""
        places = zip(begins, sizes, strict=True)
        return cls(
            tuple(slice(0, size) for size in sizes),
            tuple(range(begin, begin + size) for begin, size in places),
        )

    def overlap_with(self, other: ShardSlice) -> tuple[Slices, Slices] | None:
        """Return the overlap with another slice: its position in this shard and in the other."""
        both = []
        for ours, theirs in zip(self.place, other.place, strict=True):
            both.append(range(max(ours.start, theirs.start), min(ours.stop, theirs.stop)))
        return (self._where(both), other._where(both)) if all(both) else None

    def _where(self, place: Sequence[range]) -> Slices:
        slices = []
        for local, ours, shared in zip(self.local, self.place, place, strict=True):
            begin = local.start + shared.start - ours.start
            slices.append(slice(begin, begin + len(shared)))
        return tuple(slices)


def shard_slices(tensor: Tensor) -> list[ShardSlice]:
    """Return the slices that form this rank's part of a tensor."""
    full = [[range(size)] for size in tensor.shape]
    ranges = local_ranges(tensor) if isinstance(tensor, DTensor) else full
    along = []
    for of_dim in ranges:
        ends = itertools.accumulate(map(len, of_dim))
        along.append(
            [(slice(end - len(span), end), span) for end, span in zip(ends, of_dim, strict=True)]
        )
    boxes = itertools.product(*along)
    return [ShardSlice(tuple(n for n, _ in box), tuple(n for _, n in box)) for box in boxes]


def local_part(weight: Tensor) -> Tensor:
    """Return this rank's shard of a weight, or a plain tensor itself; gradients flow through it."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def is_first_replica(tensor: Tensor, ranks: range) -> bool:
    """True on the first of `ranks` that have the same shard of a tensor, or the same plain tensor.

    `ranks` are all ranks with the same layers. The mesh of a tensor may have only some of them:
    with tensor parallelism under ddp, every copy of the model has its own mesh.
    """
    if not isinstance(tensor, DTensor):
        return dist.get_rank() == ranks.start
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a rank holds tensors of its own mesh only"
    places = zip(coordinate, tensor.placements, strict=True)
    is_first = all(place == 0 for place, placement in places if isinstance(placement, Replicate))
    return is_first and ranks.start in mesh.mesh


def whole_tensor(tensor: DTensor, gather: Gather) -> Tensor | None:
    """Gather the tensor from its shards; None on ranks where `gather` returns None.

    The last split is undone first.
    """
    part = tensor.to_local()
    cuts = cuts_of(tensor)
    for number in reversed(range(len(cuts))):
        cut = cuts[number]
        num_rows = sum(map(len, local_ranges(tensor, number)[cut.dim])) // cut.packed
        group = tensor.device_mesh.get_group(cut.axis)
        rows = gather(cut.as_rows(part).contiguous(), num_rows, group)
        if rows is None:
            return None
        part = cut.undo_rows(rows)
    return part


def all_gather_rows(mine: Tensor, num_rows: int, group: dist.ProcessGroup) -> Tensor:
    """Return all rows, on every rank; the last ranks may have fewer rows than others, or none.

    It runs a single collective; torch's implementation takes several times as long for tensors of a
    few kilobytes.
    """
    most = max(1, -(-num_rows // group.size()))
    if len(mine) < most:
        mine = torch.cat([mine, mine.new_zeros(most - len(mine), *mine.shape[1:])])
    gathered = mine.new_empty(group.size() * most, *mine.shape[1:])
    dist.all_gather(list(gathered.chunk(group.size())), mine, group=group)
    return gathered[:num_rows]


def gather_rows(rows_here: Tensor, num_rows: int, group: dist.ProcessGroup) -> Tensor | None:
    """Return all rows on the first rank, None on the others.

    Rows are received directly in their place, and fewer bytes are sent than in an all-gather.
    """
    if group.rank() != 0:
        if rows_here.numel():
            dist.send(rows_here, group=group, group_dst=0)
        return None

    gathered = rows_here.new_empty(num_rows, *rows_here.shape[1:])
    most = max(1, -(-num_rows // group.size()))
    mine, *others = gathered.split(most)  # the last ranks may have no rows
    arriving = [
        dist.irecv(rows, group=group, group_src=rank) for rank, rows in enumerate(others, 1)
    ]
    mine.copy_(rows_here)
    for work in arriving:
        assert work is not None, "this rank is in the group"
        work.wait()
    return gathered
