"""Tensors of all ranks in one folder, each rank's own pieces in a file of its own.

    <folder>/<rank>.safetensors      pieces by name; the header says where each belongs

A piece is what a rank holds of a sharded tensor. One that every rank holds whole is written by one
of them. Nothing is pickled: whoever reads the folder runs no code of who wrote it. Any number of
ranks reads what any other number wrote.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from verl_like.errors import CheckpointError
from workers.models.tensor_files import AT_ONCE, FileWriter, write_tensors

FORMAT = "verl_like.shards"


@dataclass(frozen=True)
class Piece:
    """A block of a tensor."""

    values: Tensor
    offsets: tuple[int, ...]
    """Where its first element is in the whole tensor, along every dim."""
    shape: tuple[int, ...]
    """Of the whole tensor."""


def write_shards(
    tensors: Mapping[str, Tensor],
    folder: Path,
    rank: int,
    num_ranks: int,
    writer: FileWriter = AT_ONCE,
) -> None:
    """Write this rank's file; every rank calls it with the same names in the same order."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = pieces_to_write(tensors, rank, num_ranks)
    write_pieces(pieces, folder / f"{rank}.safetensors", writer)


def pieces_to_write(tensors: Mapping[str, Tensor], rank: int, num_ranks: int) -> dict[str, Piece]:
    """What this rank writes; together the ranks write every element once."""
    bytes_of = [0] * num_ranks
    mine = {}
    for name, tensor in tensors.items():
        piece = own_piece(tensor)
        if isinstance(tensor, DTensor):
            is_mine = _is_first_replica(tensor)
        else:
            writer = bytes_of.index(min(bytes_of))
            bytes_of[writer] += tensor.nbytes
            is_mine = writer == rank
        if is_mine and piece.values.numel():
            mine[name] = piece
    return mine


def own_piece(tensor: Tensor) -> Piece:
    """What this rank holds of a tensor."""
    if not isinstance(tensor, DTensor):
        return Piece(tensor.detach(), (0,) * tensor.dim(), tuple(tensor.shape))
    sharded: Any = tensor
    (chunk,) = sharded.__create_chunk_list__()
    return Piece(sharded.to_local().detach(), tuple(chunk.offsets), tuple(tensor.shape))


def _is_first_replica(tensor: DTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "a rank holds tensors of its own mesh only"
    places = zip(coordinate, tensor.placements, strict=True)
    return all(place == 0 for place, placement in places if isinstance(placement, Replicate))


def write_pieces(pieces: Mapping[str, Piece], path: Path, writer: FileWriter = AT_ONCE) -> None:
    """A safetensors file, piece after piece."""
    places = json.dumps({name: [piece.offsets, piece.shape] for name, piece in pieces.items()})
    tensors = {name: piece.values for name, piece in pieces.items()}
    write_tensors(tensors, path, {"format": FORMAT, "places": places}, writer)


def read_shards(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fill this rank's part of every tensor; other tensors of the folder stay unread."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        there = ", ".join(sorted(path.name for path in folder.glob("*"))[:5]) or "nothing"
        raise CheckpointError(f"{folder} holds no <rank>.safetensors to read, but {there}")

    own = {name: own_piece(tensor) for name, tensor in tensors.items()}
    num_left = {name: piece.values.numel() for name, piece in own.items()}
    seen: set[tuple[str, tuple[int, ...]]] = set()
    for path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                for name, offsets in _places(opened, path, own):
                    if (name, offsets) in seen:
                        raise CheckpointError(f"{path} holds {name} again, at {list(offsets)}")
                    seen.add((name, offsets))
                    num_left[name] -= _copy_overlap(opened.get_slice(name), offsets, own[name])
        except SafetensorError as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error

    missing = [name for name, count in num_left.items() if count]
    if missing:
        raise CheckpointError(
            f"{folder} does not hold every element of {len(missing)} tensors once: "
            f"{', '.join(missing[:5])}"
        )


def _places(
    opened: Any, path: Path, wanted: Mapping[str, Piece]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, offsets) of the wanted pieces of a file; a header that is not ours is refused."""
    facts = opened.metadata() or {}
    if facts.get("format") != FORMAT:
        raise CheckpointError(f"{path} is no shard of a checkpoint: its header is {facts!r:.80}")
    try:
        places = json.loads(facts.get("places", ""))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: its header has no places: {error}") from error

    for name in opened.keys():
        if name not in wanted:
            continue
        size = opened.get_slice(name).get_shape()
        place = places.get(name) if isinstance(places, dict) else None
        if not _is_place(place, size, wanted[name].shape):
            raise CheckpointError(
                f"{path} is damaged: {name} of shape {size} is said to be at {place!r:.80} of a "
                f"tensor of shape {list(wanted[name].shape)}"
            )
        yield name, tuple(place[0])


def _is_place(place: Any, size: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether it is [offsets, whole shape], and a block of that size lies within."""
    if not (isinstance(place, list) and len(place) == 2 and place[1] == list(shape)):
        return False
    offsets = place[0]
    if not (isinstance(offsets, list) and len(offsets) == len(size) == len(shape)):
        return False
    if not all(type(offset) is int and offset >= 0 for offset in offsets):
        return False
    return all(o + s <= whole for o, s, whole in zip(offsets, size, shape, strict=True))


def _copy_overlap(stored: Any, offsets: Sequence[int], own: Piece) -> int:
    """Copy what a stored block has of this rank's; gives the number of elements."""
    target, there = own.values, []
    for dim, (first, size) in enumerate(zip(offsets, stored.get_shape(), strict=True)):
        mine = own.offsets[dim]
        start, end = max(first, mine), min(first + size, mine + own.values.shape[dim])
        if end <= start:
            return 0
        target = target.narrow(dim, start - mine, end - start)
        there.append(slice(start - first, end - first))

    found = stored[tuple(there)]
    target.copy_(found)
    return math.prod(found.shape)
