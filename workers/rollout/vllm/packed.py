"""Weights that vLLM packs for its kernels on CPUs, or quantises: no longer as they came.

    packed = PackedWeights(written)
    watch_packing(model, packed.packing)   # once a model: around the packing of every load
    held = packed.read_back(model)         # after the load

A linear layer gets a function, `cpu_linear`, whose packed weight nobody else can read, and drops
the weight itself; an embedding keeps it beside. So the weight is compared bit for bit with what
came when it has just been packed, and the packed copy after the load, by what it computes
(`probes`). Experts are packed into a parameter with the same elements in another order: once that
is seen to be so, it is read back as other weights are. What a layer quantises is compared bit for
bit just before that: which rounding follows is the method's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from workers.rollout.vllm.probes import Product, probes
from workers.rollout.vllm.read_back import Held, Piece, WrittenPieces, keeps_weights

Watch = Callable[[nn.Module], AbstractContextManager[None]]


def watch_packing(model: nn.Module, watch: Watch) -> None:
    """Have a loaded model's layers pack or quantise their weights within `watch(layer)`."""
    looked_at = (_packs, _packs_experts, _quantises)
    layers = [layer for layer in model.modules() if any(does(layer) for does in looked_at)]
    methods: dict[int, Any] = {id(layer.quant_method): layer.quant_method for layer in layers}
    for method in methods.values():
        process = method.process_weights_after_loading
        method.process_weights_after_loading = partial(_process_within, watch, process)


def _process_within(watch: Watch, process: Callable[[nn.Module], None], layer: nn.Module) -> None:
    with watch(layer):
        process(layer)


def _packs(layer: nn.Module) -> bool:
    return hasattr(layer, "cpu_linear")


def _packs_experts(layer: nn.Module) -> bool:
    weight = next(layer.parameters(recurse=False), None)
    has_kernel = hasattr(getattr(layer, "quant_method", None), "moe_kernel")
    return has_kernel and weight is not None and weight.device.type == "cpu"


def _quantises(layer: nn.Module) -> bool:
    """Or has others than came for a reason of its method's own, as experts on GPUs."""
    if _packs(layer) or _packs_experts(layer) or keeps_weights(layer):
        return False
    return hasattr(layer.quant_method, "process_weights_after_loading")


def _linear_layers(model: nn.Module) -> Iterator[Any]:
    return filter(_packs, model.modules())


@dataclass(frozen=True)
class _Matrix:
    """A weight that a layer was given: what came for its rows, and what they multiply to."""

    pieces: list[tuple[Piece, slice]]
    product: Product
    num_inputs: int
    dtype: torch.dtype

    @classmethod
    def of(cls, weight: Tensor, pieces: list[Piece]) -> _Matrix:
        """Of a weight that can still be read."""
        rows = [(piece, piece.rows_of(weight)) for piece in pieces]
        return cls(rows, Product(weight), weight.shape[1], weight.dtype)

    def differs_in(self, layer: Any) -> set[str]:
        """Names of what came that the layer does not compute with."""
        found = layer.cpu_linear(probes(self.num_inputs, self.dtype), layer.weight, None)
        wrong = self.product.wrong_rows(found)
        if wrong is None:
            return set()
        return {piece.name for piece, rows in self.pieces if wrong[rows].any()}


class PackedWeights:
    """Those of one load; what was written into them is known by `written`."""

    def __init__(self, written: WrittenPieces) -> None:
        self._written = written
        self._new: set[nn.Module] = set()
        self._dropped: dict[nn.Module, _Matrix] = {}
        self._rounded: Counter[str] = Counter()
        """How many elements of a tensor were as they came when their layers quantised them."""
        self._damaged: set[str] = set()

    @contextmanager
    def packing(self, layer: nn.Module) -> Iterator[None]:
        """While this layer packs its weights; looks at those that it then has no longer."""
        weights = dict(layer.named_parameters(recurse=False))
        pieces = {name: self._written.pieces_of(weight) for name, weight in weights.items()}
        quantises = _quantises(layer)
        if quantises:
            with _disable_current_modes():  # `written` need not look on
                pieces = {name: self._whole(pieces[name], weights[name]) for name in weights}
        yield
        self._new.add(layer)
        with _disable_current_modes():
            for name, weight in weights.items():
                now = getattr(layer, name, None)
                if now is weight:
                    continue
                if quantises:
                    for piece in pieces[name]:
                        self._rounded[piece.name] += len(piece)
                else:
                    self._look_at(layer, weight, pieces[name], now)

    def _whole(self, pieces: list[Piece], weight: Tensor) -> list[Piece]:
        """Those that a weight has, before it is quantised; what it has otherwise is damaged."""
        comparable = [piece for piece in pieces if piece.dtype == weight.dtype]
        found = [piece for piece in comparable if piece.is_in(weight)]
        self._damaged |= {piece.name for piece in comparable if piece not in found}
        return found

    def _look_at(self, layer: nn.Module, weight: Tensor, pieces: list[Piece], now: Any) -> None:
        """A weight that has just been packed, while it is still there."""
        self._damaged |= {piece.name for piece in pieces if not piece.is_in(weight)}
        if _packs(layer) and weight.dim() == 2:
            self._dropped[layer] = _Matrix.of(weight, pieces)
        elif (now.shape, now.dtype) == (weight.shape, weight.dtype):
            found = [piece.reordered(weight, now) for piece in pieces]
            self._written.add(now, [piece for piece in found if piece is not None])

    def pack_tied(self, model: nn.Module) -> None:
        """Have layers pack their weight that this load has filled by its other name alone.

        A head that is tied to the embedding would compute with what was packed before: vLLM takes
        it for a layer without new weights.
        """
        for layer in _linear_layers(model):
            if layer not in self._new and layer.weight.dim() == 2:
                layer.quant_method.process_weights_after_loading(layer)

    def read_back(self, model: nn.Module) -> Held:
        """What the layers compute with; weights that they keep beside are counted elsewhere."""
        num_elements = dict(self._rounded)
        damaged = set(self._damaged)
        for layer in _linear_layers(model):
            matrix = self._dropped.get(layer)
            if matrix is not None:
                for piece, _ in matrix.pieces:
                    num_elements[piece.name] = num_elements.get(piece.name, 0) + len(piece)
            elif layer.weight.dim() == 2:
                matrix = _Matrix.of(layer.weight, self._written.pieces_of(layer.weight))
            else:
                continue  # dropped, and nothing was loaded into it
            damaged |= matrix.differs_in(layer)
        for name in damaged:
            num_elements.pop(name, None)
        return Held(num_elements, tuple(sorted(damaged)))
