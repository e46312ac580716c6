"""Where the parts of a DTensor lie in the whole, and how they become it.

Tensor parallelism cuts a weight first, by the last axis of the mesh; FSDP2 cuts the rows of what is
left, and says so by a `_StridedShard`. A packed weight is several end to end, each cut by itself.
torch's own rules know no packed ones, and no rows that the cuts leave uneven.
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
"""(a rank's rows, the number of all rows, the ranks that have them) -> all rows, where it says."""


Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Cut:
    """One axis of a mesh over which a dim is cut."""

    axis: int
    dim: int
    packed: int
    """Pieces that lie end to end along the dim, each of which is cut."""
    num_ranks: int

    def part(self, ranges: Sequence[range], rank: int) -> list[range]:
        """What a rank gets of ranges that lie end to end; the last ranks may get less, or none."""
        size = sum(map(len, ranges)) // self.packed
        most = -(-size // self.num_ranks)
        begin, end = min(rank * most, size), min((rank + 1) * most, size)
        found: list[range] = []
        for piece in range(self.packed):
            found += _between(ranges, piece * size + begin, piece * size + end)
        return found

    def as_rows(self, tensor: Tensor) -> Tensor:
        """What is cut comes first, pieces that lay end to end side by side."""
        size = tensor.shape[self.dim] // self.packed
        return tensor.unflatten(self.dim, (self.packed, size)).movedim(self.dim + 1, 0)

    def as_it_was(self, rows: Tensor) -> Tensor:
        """The inverse of `as_rows`."""
        return rows.movedim(0, self.dim + 1).flatten(self.dim, self.dim + 1).contiguous()


def _between(ranges: Sequence[range], begin: int, end: int) -> list[range]:
    found, start = [], 0
    for one in ranges:
        own = one[max(begin - start, 0) : max(end - start, 0)]
        found += [own] if own else []
        start += len(one)
    return found


def cuts_of(tensor: DTensor) -> list[Cut]:
    """How it is cut, one after the other."""
    mesh, placements = tensor.device_mesh, tensor.placements
    found, last = [], []
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        dim, factor = _dim_of(placement), getattr(placement, "split_factor", 1)
        assert dim is not None, f"{placement} is no weight's"
        later = [n for n in range(axis + 1, mesh.ndim) if _dim_of(placements[n]) == dim]
        if later and factor == math.prod(mesh.size(n) for n in later):
            last.append(Cut(axis, dim, 1, mesh.size(axis)))
        else:
            found.append(Cut(axis, dim, factor, mesh.size(axis)))
    return found + last[::-1]


def _dim_of(placement: Placement) -> int | None:
    dim: int | None = getattr(placement, "dim", None)
    return dim


def own_ranges(tensor: DTensor, num_cuts: int | None = None) -> list[list[range]]:
    """Along each dim, the ranges of the whole that lie end to end in this rank's part of it.

    After so many of the cuts; None is all.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank holds tensors of its own mesh only"
    ranges = [[range(size)] for size in tensor.shape]
    for cut in cuts_of(tensor)[:num_cuts]:
        ranges[cut.dim] = cut.part(ranges[cut.dim], coordinate[cut.axis])
    return ranges


@dataclass(frozen=True)
class Piece:
    """What a rank holds of a tensor without a gap: where in its part, and where in the whole."""

    local: Slices
    place: tuple[range, ...]

    @classmethod
    def at(cls, begins: Sequence[int], sizes: Sequence[int]) -> Piece:
        """A tensor of these sizes that begins there."""
        places = zip(begins, sizes, strict=True)
        return cls(
            tuple(slice(0, size) for size in sizes),
            tuple(range(begin, begin + size) for begin, size in places),
        )

    def shared_with(self, other: Piece) -> tuple[Slices, Slices] | None:
        """What both have of the whole: where in the own part, and where in the other's."""
        both = []
        for ours, theirs in zip(self.place, other.place, strict=True):
            both.append(range(max(ours.start, theirs.start), min(ours.stop, theirs.stop)))
        return (self._where(both), other._where(both)) if all(both) else None

    def _where(self, place: Sequence[range]) -> Slices:
        found = []
        for local, ours, one in zip(self.local, self.place, place, strict=True):
            begin = local.start + one.start - ours.start
            found.append(slice(begin, begin + len(one)))
        return tuple(found)


def pieces_of(tensor: Tensor) -> list[Piece]:
    """Together, all that this rank holds of it."""
    whole = [[range(size)] for size in tensor.shape]
    ranges = own_ranges(tensor) if isinstance(tensor, DTensor) else whole
    along = []
    for of_dim in ranges:
        ends = itertools.accumulate(map(len, of_dim))
        along.append(
            [(slice(end - len(one), end), one) for end, one in zip(ends, of_dim, strict=True)]
        )
    boxes = itertools.product(*along)
    return [Piece(tuple(n for n, _ in box), tuple(n for _, n in box)) for box in boxes]


def local_part(weight: Tensor) -> Tensor:
    """What this rank holds of a weight, with its gradient."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def is_first_replica(tensor: DTensor) -> bool:
    """Whether of the ranks that hold the same part of a tensor this is the first."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank holds tensors of its own mesh only"
    places = zip(coordinate, tensor.placements, strict=True)
    return all(place == 0 for place, placement in places if isinstance(placement, Replicate))


def whole_tensor(tensor: DTensor, gather: Gather) -> Tensor | None:
    """The whole, where `gather` has that; cut by cut, the last one first."""
    part = tensor.to_local()
    cuts = cuts_of(tensor)
    for number in reversed(range(len(cuts))):
        cut = cuts[number]
        num_rows = sum(map(len, own_ranges(tensor, number)[cut.dim])) // cut.packed
        group = tensor.device_mesh.get_group(cut.axis)
        rows = gather(cut.as_rows(part).contiguous(), num_rows, group)
        if rows is None:
            return None
        part = cut.as_it_was(rows)
    return part


def all_gather_rows(own: Tensor, num_rows: int, group: dist.ProcessGroup) -> Tensor:
    """All rows, on every rank; the last ranks may have fewer than others, or none.

    One collective and nothing else: torch's own way takes several times as long on tensors of some
    kilobytes.
    """
    most = max(1, -(-num_rows // group.size()))
    if len(own) < most:
        own = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])])
    whole = own.new_empty(group.size() * most, *own.shape[1:])
    dist.all_gather(list(whole.chunk(group.size())), own, group=group)
    return whole[:num_rows]


def gather_rows(own: Tensor, num_rows: int, group: dist.ProcessGroup) -> Tensor | None:
    """All rows on the first rank, None elsewhere.

    Each rank's go straight to their place: half the bytes of an all-gather, and no copies.
    """
    if group.rank() != 0:
        if own.numel():
            dist.send(own, group=group, group_dst=0)
        return None

    whole = own.new_empty(num_rows, *own.shape[1:])
    most = max(1, -(-num_rows // group.size()))
    mine, *others = whole.split(most)  # the last ranks may have none
    arriving = [
        dist.irecv(rows, group=group, group_src=rank) for rank, rows in enumerate(others, 1)
    ]
    mine.copy_(own)
    for work in arriving:
        assert work is not None, "this rank is in the group"
        work.wait()
    return whole
