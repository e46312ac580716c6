"""Hashes of weights before an engine quantizes them to int8.

A sync is verified by comparing the engine's weights with the trainer's, and int8 numbers cannot be
compared with floats. So an engine records the hash of every tensor that it quantizes, together with
the hash of the result. The first hash represents the weight in the engine's checksum, as long as
the second still matches.
"""

from __future__ import annotations

from torch import Tensor

from workers.models.quantize import Int8Weight
from workers.weights.checksum import NamedTensors, byte_view, digest_of, float32_hash, hashes_of


class Int8Hashes:
    """The hashes of one engine's int8 weights: of the received tensor and of the result."""

    def __init__(self) -> None:
        self._hashes: dict[str, tuple[int, list[int]]] = {}

    def note(self, name: str, sent: Tensor, stored: Tensor | None) -> None:
        """Record that a received tensor was written into `stored`."""
        if isinstance(stored, Int8Weight):
            self._hashes[name] = int(float32_hash(sent)), _held_hashes(stored)

    def checksum(self, weights: NamedTensors) -> str:
        """Return `workers.weights.checksum.checksum_of` the weights, with int8 weights as received.

        An int8 weight that has changed since quantization counts with its current numbers.
        """
        return digest_of((name, weight.shape, self._of(name, weight)) for name, weight in weights)

    def _of(self, name: str, weight: Tensor) -> int:
        if not isinstance(weight, Int8Weight):
            return int(float32_hash(weight))
        received, result = self._hashes.get(name, (0, []))
        current = _held_hashes(weight)
        return received if result == current else current[0]


def _held_hashes(weight: Int8Weight) -> list[int]:
    return hashes_of([byte_view(part.contiguous()) for part in (weight.numbers, weight.scales)])
