"""What vLLM's model holds of the weights that were written into it, read back after a load.

    read_back = ReadBack()
    with read_back:
        read_back.expect(name, tensor)                # a tensor that has arrived ...
        model.load_weights([(name, tensor)])          # ... goes where vLLM's loaders put it
    held = read_back.held(model)

vLLM fuses projections, pads vocabularies, cuts tensors over its ranks and loads layers into memory
that it copies from. Its own loaders know where each tensor goes. So every copy that they make is
noted: the part of the parameter, and the hash of the bytes that belong there. Afterwards the same
parts are read again. A weight that its layer packs for a kernel or quantises is compared just
before (`processing`), once vLLM has put it together: what follows is the kernel's own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

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
        damaged = {*self.damaged, *other.damaged}
        counts = Counter(self.num_elements) + Counter(other.num_elements)
        kept = {name: count for name, count in counts.items() if name not in damaged}
        return Held(kept, tuple(sorted(damaged)))


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

    def __len__(self) -> int:
        return math.prod(self.size)

    def is_in(self, weight: Tensor) -> bool:
        """Whether the memory of `weight` has it bit for bit."""
        part = weight.detach().as_strided(self.size, self.stride, self.offset)
        return hash_of(byte_view(part.contiguous())) == self.value


class ReadBack(TorchDispatchMode):
    """Within, notes every copy of an expected tensor, or of a part of it, into other memory.

    Memory is known by its storage, which no later one can be taken for.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[StorageWeakRef, str] = {}
        self._pieces: dict[StorageWeakRef, dict[_Place, Piece]] = {}
        self._before = Held()
        """Of weights that their layers have packed or quantised since."""

    def expect(self, name: str, tensor: Tensor) -> None:
        """Note the name of a tensor that is about to be loaded."""
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
            written = source.to(into.device, into.dtype).expand(into.shape).contiguous()
            where = tuple(into.shape), into.stride(), into.storage_offset()
            after[where] = Piece(name, *where, into.dtype, hash_of(byte_view(written)))
        elif source is not None and origin in self._pieces and _is_whole(into, source):
            # a layer that was loaded elsewhere is copied to where its kernel looks
            shift = into.storage_offset() - source.storage_offset()
            for piece in self._pieces.pop(origin).values():
                moved = replace(piece, offset=piece.offset + shift)
                after[moved.size, moved.stride, moved.offset] = moved
        if before or after:
            self._pieces[place] = after

    @contextmanager
    def processing(self, layer: nn.Module) -> Iterator[None]:
        """While this layer makes of its weights what its kernel takes; compares them just before.

        What is still in its place afterwards is compared again in the end.
        """
        weights = dict(layer.named_parameters(recurse=False))
        places = {name: _storage(weight) for name, weight in weights.items()}
        with _disable_current_modes():
            found = {name: self._compared(weight) for name, weight in weights.items()}
        yield
        for name, before in found.items():
            now = getattr(layer, name, None)
            if not isinstance(now, Tensor) or _storage(now) != places[name]:
                self._before += before

    def held(self, model: nn.Module) -> Held:
        """What the model's parameters and buffers hold of what was written."""
        held, seen = self._before, set[int]()
        for module in model.modules():
            for weight in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if id(weight) not in seen:
                    seen.add(id(weight))
                    found = self._compared(weight)
                    # what a layer computes anew is no damage
                    held += found if keeps_weights(module) else Held(found.num_elements)
        return held

    def _compared(self, weight: Tensor) -> Held:
        """What was written into the memory of a weight, and not over since, and is there."""
        held = Held()
        for piece in self._pieces.get(_storage(weight), {}).values():
            if weight.dtype != piece.dtype:
                continue  # a kernel's own type
            is_there = piece.is_in(weight)
            held += Held({piece.name: len(piece)}) if is_there else Held(damaged=(piece.name,))
        return held


def keeps_weights(layer: nn.Module) -> bool:
    """Whether it computes with its weights as they were loaded, or with a packed copy of them."""
    method = getattr(layer, "quant_method", None)
    return method is None or type(method).__name__ in UNQUANTIZED


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
