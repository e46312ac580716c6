"""Base class of engines that decode with a torch module."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workers.models.quantize import Int8Weight
from workers.models.routing import Routers
from workers.models.state import named_state
from workers.models.tensor_files import byte_view
from workers.rollout.base import EngineLimits, RolloutEngine
from workers.weights.full_weights import (
    ModuleWriter,
    NamedTensors,
    digest_of,
    float32_hash,
    hashes_of,
)

if TYPE_CHECKING:
    from workers.models.images import ImageInput


class ModuleRolloutEngine(RolloutEngine):
    """Loads weights into `module`; frees and allocates its parameters."""

    def __init__(
        self, module: Any, limits: EngineLimits, decode: Callable[[list[int]], str] | None = None
    ) -> None:
        super().__init__(limits, decode)
        self.module = module
        self.vocab_size = module.config.get_text_config().vocab_size
        self.num_bytes = sum(
            weight.numel() * weight.element_size() for _, weight in named_state(module)
        )
        self._shapes: list[torch.Size] = []
        self.int8 = Int8Hashes()

    @cached_property
    def images(self) -> ImageInput:
        """The images in prompts; an error if the model reads none."""
        from workers.models.images import ImageInput

        return ImageInput(self.module, self.image_reader)

    @cached_property
    def routers(self) -> Routers:
        """The routers of the module; raises a ConfigError if it has none."""
        return Routers(self.module)

    def no_choices(self) -> Tensor | None:
        """Return an empty tensor of expert choices, [0, layers, choices]."""
        return self.routers.no_choices

    def _load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        writer = ModuleWriter(self.module)
        for name, tensor in tensors:
            writer.write_tensor(name, tensor)
            self.int8.note(name, tensor, writer.targets.get(name))
        writer.verify("engine")

    def weights_checksum(self) -> str:
        """Return a hash of the full weights, comparable with the trainer's.

        Weights that were quantized to int8 count as they were received.
        """
        return self.int8.checksum(self.named_weights())

    def _free(self) -> None:
        """Free every parameter's memory."""
        self._shapes = [parameter.shape for parameter in self.module.parameters()]
        for parameter in self.module.parameters():
            if isinstance(parameter, Int8Weight):
                parameter.free()
            else:
                parameter.data = parameter.data.new_empty(0)

    def _allocate(self) -> None:
        """Allocate memory for every parameter, with undefined contents."""
        for parameter, shape in zip(self.module.parameters(), self._shapes, strict=True):
            if isinstance(parameter, Int8Weight):
                parameter.allocate()
            else:
                parameter.data = parameter.data.new_empty(shape)


class Int8Hashes:
    """Hashes of an engine's weights before and after it quantizes them to int8.

    The checksums of the engine and the trainer are compared, and int8 weights have other bytes than
    the trainer's. So the engine's checksum uses the hash of the received tensor, as long as the
    hash of the quantized weight has not changed.
    """

    def __init__(self) -> None:
        self._hashes: dict[str, tuple[int, list[int]]] = {}

    def note(self, name: str, sent: Tensor, stored: Tensor | None) -> None:
        """Record that a received tensor was written into `stored`."""
        if isinstance(stored, Int8Weight):
            self._hashes[name] = int(float32_hash(sent)), _current_hashes(stored)

    def checksum(self, weights: NamedTensors) -> str:
        """Return the checksum (`checksum_of`) of the weights, with int8 weights as received.

        An int8 weight that has changed since quantization counts with its current numbers.
        """
        hashes = []
        for name, weight in weights:
            if isinstance(weight, Int8Weight):
                received, result = self._hashes.get(name, (0, []))
                current = _current_hashes(weight)
                number = received if result == current else current[0]
            else:
                number = int(float32_hash(weight))
            hashes.append((name, weight.shape, number))
        return digest_of(hashes)


def _current_hashes(weight: Int8Weight) -> list[int]:
    return hashes_of([byte_view(part) for part in (weight.numbers, weight.scales)])
