"""Linear layers that compute with a copy of their weight which vLLM has packed for a kernel.

    packed = PackedLinears(written)
    watch_packing(model, packed.note)      # once a model: `note` is called in every load
    held = packed.read_back(model)         # after the load

On CPUs vLLM gives such a layer a function, `cpu_linear`, whose packed weight nobody else can read,
and drops the weight itself; an embedding keeps it beside. So the weight is compared bit for bit
with what came when it has just been packed, and the packed copy after the load, by what it computes
(`probes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from workers.rollout.vllm.probes import Product, probes
from workers.rollout.vllm.read_back import Held, Piece, WrittenPieces

Note = Callable[[nn.Module, Tensor], None]


def watch_packing(model: nn.Module, note: Note) -> None:
    """Have `note(layer, weight)` called whenever a layer of a loaded model has packed a weight."""
    methods = {id(layer.quant_method): layer.quant_method for layer in _packing_layers(model)}
    for method in methods.values():
        process = method.process_weights_after_loading
        method.process_weights_after_loading = partial(_process_and_note, process, note)


def _process_and_note(process: Callable[[nn.Module], None], note: Note, layer: nn.Module) -> None:
    weight = layer.weight
    assert isinstance(weight, Tensor), f"{type(layer).__name__}.weight is no tensor"
    process(layer)
    note(layer, weight)


def _packing_layers(model: nn.Module) -> Iterator[Any]:
    return (layer for layer in model.modules() if hasattr(layer, "cpu_linear"))


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


class PackedLinears:
    """The packed weights of one load; what was written into them is known by `written`."""

    def __init__(self, written: WrittenPieces) -> None:
        self._written = written
        self._new: set[nn.Module] = set()
        self._dropped: dict[nn.Module, _Matrix] = {}
        self._damaged: set[str] = set()

    def note(self, layer: nn.Module, weight: Tensor) -> None:
        """This layer has just packed this weight; looks at it where the layer has dropped it."""
        self._new.add(layer)
        if layer.weight is weight:
            return
        with _disable_current_modes():  # `written` need not look on
            pieces = self._written.pieces_of(weight)
            self._damaged |= {piece.name for piece in pieces if not piece.is_in(weight)}
            self._dropped[layer] = _Matrix.of(weight, pieces)

    def pack_tied(self, model: nn.Module) -> None:
        """Have layers pack their weight that this load has filled by its other name alone.

        A head that is tied to the embedding would compute with what was packed before: vLLM takes
        it for a layer without new weights.
        """
        for layer in _packing_layers(model):
            if layer not in self._new and layer.weight.dim() == 2:
                layer.quant_method.process_weights_after_loading(layer)

    def read_back(self, model: nn.Module) -> Held:
        """What the layers compute with; weights that they keep beside are counted elsewhere."""
        num_elements: dict[str, int] = {}
        damaged = set(self._damaged)
        for layer in _packing_layers(model):
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
