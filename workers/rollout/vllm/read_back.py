"""What vLLM's model holds of the weights that were written into it, read back after a load.

    written = WrittenPieces()
    with written:
        written.expect(name, tensor)                  # a tensor that has arrived ...
        model.load_weights([(name, tensor)])          # ... goes where vLLM's loaders put it
    held = written.read_back(model)

vLLM fuses projections, pads vocabularies, cuts tensors over its ranks and loads layers into memory
that it copies from. Its own loaders know where each tensor goes. So every copy that they make is
noted: the part of the parameter, and the hash of the bytes that belong there. Afterwards the same
parts are read again. What layers on CPUs have packed for their kernels is not there as it came
(`packed` looks at it, and at what a layer quantises, just before).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from workers.weights.checksum import byte_view, hash_of

UNQUANTIZED = ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
"""Methods of layers that compute with the weights as they were loaded, or with a packed copy."""


@dataclass(frozen=True)
class Held:
    """What one process of vLLM found when it read its weights again."""

    num_elements: dict[str, int] = field(default_factory=dict)
    """Of each tensor: how many of its elements are held bit for bit as they arrived."""
    damaged: tuple[str, ...] = ()
    """Tensors of which a part is held otherwise."""

    def __add__(self, other: Held) -> Held:
        """What two readings of different layers have found."""
        num_elements = Counter(self.num_elements) + Counter(other.num_elements)
        damaged = {*self.damaged, *other.damaged}
        return Held(dict(num_elements), tuple(sorted(damaged)))


_Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""Size, stride and offset of a part of some memory."""


@dataclass(frozen=True)
class Piece:
    """A part of a parameter, and the hash of what was written there."""

    name: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    value: int
    is_packed: bool = False
    """Its layer has packed it: nothing computes it anew any more."""

    def __len__(self) -> int:
        """How many elements it has."""
        return math.prod(self.size)

    def is_in(self, weight: Tensor) -> bool:
        """Whether the memory of `weight` has it bit for bit."""
        part = weight.detach().as_strided(self.size, self.stride, self.offset)
        return _hash(part) == self.value

    def reordered(self, weight: Tensor, packed: Tensor) -> Piece | None:
        """Itself in a copy of `weight` that has its elements in another order; None if not there.

        They are known by their sum as integers: any one that differs changes it.
        """
        offset = self.offset - weight.storage_offset() + packed.storage_offset()
        part = packed.detach().as_strided(self.size, self.stride, offset)
        words = {2: torch.int16, 4: torch.int32}[self.dtype.itemsize]
        own = weight.detach().as_strided(self.size, self.stride, self.offset)
        if part.contiguous().view(words).sum() != own.contiguous().view(words).sum():
            return None
        return replace(self, offset=offset, value=_hash(part), is_packed=True)

    def rows_of(self, weight: Tensor) -> slice:
        """The rows of a contiguous matrix in which it lies."""
        first = self.offset - weight.storage_offset()
        last = first + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        return slice(first // weight.stride(0), last // weight.stride(0) + 1)


class WrittenPieces(TorchDispatchMode):
    """Within, notes every copy of an expected tensor, or of a part of it, into other memory.

    Memory is known by its storage, which no later one can be taken for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[StorageWeakRef, str] = {}
        self._pieces: dict[StorageWeakRef, dict[_Place, Piece]] = {}

    def expect(self, name: str, tensor: Tensor) -> None:
        """This tensor is about to be loaded."""
        self._sources[_storage(tensor)] = name

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs the operation, and looks at what it writes into."""
        result = func(*args, **(kwargs or {}))
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            into = args[0] if args and isinstance(args[0], Tensor) else None
            if into is not None and not into.is_meta:
                self._note(into, args[1] if func is torch.ops.aten.copy_.default else None)
        return result

    def _note(self, into: Tensor, source: Tensor | None) -> None:
        place = _storage(into)
        origin = None if source is None else _storage(source)
        name = None if origin is None else self._sources.get(origin)
        before = self._pieces.get(place, {})
        # whatever else writes there computes something of it: that is not what arrived
        after = {where: piece for where, piece in before.items() if not _overlap(piece, into)}
        if source is not None and name is not None:
            value = _hash(source.to(into.dtype).expand(into.shape))
            where = tuple(into.shape), into.stride(), into.storage_offset()
            after[where] = Piece(name, *where, into.dtype, value)
        elif source is not None and origin in self._pieces and _is_whole(into, source):
            # a layer that was loaded elsewhere is copied to where its kernel looks
            shift = into.storage_offset() - source.storage_offset()
            for piece in self._pieces.pop(origin).values():
                moved = replace(piece, offset=piece.offset + shift)
                after[moved.size, moved.stride, moved.offset] = moved
        if before or after:
            self._pieces[place] = after

    def pieces_of(self, weight: Tensor) -> list[Piece]:
        """Those that were written into the memory of a weight, and not over since."""
        return list(self._pieces.get(_storage(weight), {}).values())

    def add(self, weight: Tensor, pieces: Iterable[Piece]) -> None:
        """Its memory has these as well, though no copy put them there."""
        found = {(piece.size, piece.stride, piece.offset): piece for piece in pieces}
        self._pieces.setdefault(_storage(weight), {}).update(found)

    def read_back(self, model: nn.Module) -> Held:
        """Hash what the model's parameters and buffers hold where pieces were written."""
        num_elements: dict[str, int] = {}
        damaged: set[str] = set()
        for weight, is_plain in _weights(model):
            for piece in self.pieces_of(weight):
                if weight.dtype != piece.dtype:
                    continue  # a kernel's own type
                if piece.is_in(weight):
                    num_elements[piece.name] = num_elements.get(piece.name, 0) + len(piece)
                elif is_plain or piece.is_packed:
                    damaged.add(piece.name)
        return Held(num_elements, tuple(sorted(damaged)))


def keeps_weights(layer: nn.Module) -> bool:
    """Whether it computes with its weights as they were loaded, or with a packed copy of them."""
    method = getattr(layer, "quant_method", None)
    return method is None or type(method).__name__ in UNQUANTIZED


def _weights(model: nn.Module) -> Iterator[tuple[Tensor, bool]]:
    """Every parameter and buffer once, and whether its layer keeps it as it was loaded."""
    seen: set[int] = set()
    for module in model.modules():
        is_plain = keeps_weights(module)
        for weight in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if id(weight) not in seen:
                seen.add(id(weight))
                yield weight, is_plain


def _storage(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _overlap(piece: Piece, other: Tensor) -> bool:
    """Whether the ranges of memory of a piece and of a part of the same storage meet."""
    if 0 in piece.size or not other.numel():
        return False
    ends = [
        offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
        for size, stride, offset in (
            (piece.size, piece.stride, piece.offset),
            (tuple(other.shape), other.stride(), other.storage_offset()),
        )
    ]
    return piece.offset <= ends[1] and other.storage_offset() <= ends[0]


def _is_whole(into: Tensor, source: Tensor) -> bool:
    """Whether one is the whole of its memory, and the other gets it in the same layout."""
    whole = source.untyped_storage().nbytes() == source.numel() * source.element_size()
    same = (into.shape, into.stride(), into.dtype) == (source.shape, source.stride(), source.dtype)
    return whole and same


def _hash(tensor: Tensor) -> int:
    return hash_of(byte_view(tensor.cpu().contiguous()))
