"""Hashes of weights from before an engine quantised them to int8.

A sync is proven by comparing the engine's weights with the trainer's, and int8 numbers cannot be
compared with floats. So an engine notes the hash of every tensor that it quantises, and beside it
that of what it made of it. The first stands for the weight in the engine's checksum as long as the
second holds.
"""

from __future__ import annotations

from torch import Tensor

from workers.models.quantize import Int8Weight
from workers.weights.checksum import NamedTensors, byte_view, digest_of, float32_hash, hashes_of


class Int8Hashes:
    """The hashes of one engine's int8 weights: of what came, and of what was made of it."""

    def __init__(self) -> None:
        self._hashes: dict[str, tuple[int, list[int]]] = {}

    def note(self, name: str, sent: Tensor, held: Tensor | None) -> None:
        """A tensor came, and was written into `held`."""
        if isinstance(held, Int8Weight):
            self._hashes[name] = int(float32_hash(sent)), _held_hashes(held)

    def checksum(self, weights: NamedTensors) -> str:
        """The `workers.weights.checksum.checksum_of` of the weights, with int8 ones as they came.

        An int8 weight that has changed since it was quantised counts as what it is now.
        """
        return digest_of((name, weight.shape, self._of(name, weight)) for name, weight in weights)

    def _of(self, name: str, weight: Tensor) -> int:
        if not isinstance(weight, Int8Weight):
            return int(float32_hash(weight))
        came, made = self._hashes.get(name, (0, []))
        found = _held_hashes(weight)
        return came if made == found else found[0]


def _held_hashes(weight: Int8Weight) -> list[int]:
    return hashes_of([byte_view(part.contiguous()) for part in (weight.numbers, weight.scales)])
