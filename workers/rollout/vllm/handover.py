"""Convert and verify the trainer's weights in one load of a vLLM engine.

    handover = Handover(expected_weights(model_path))
    for name, tensor in handover.checkpoint_tensors(tensors): ...  # send these to vLLM's ranks
    handover.verify(arrivals)                                      # the reports of vLLM's ranks

The trainer's tensors have the names of its module, and the checksum uses these names. vLLM expects
the names and tensors of a checkpoint, in which the experts of a layer are separate.

If vLLM has loaded the base model itself, only the LoRA adapter is sent. vLLM reads adapters from
folders in peft's format, so each sync writes such a folder:

    files = AdapterFiles(model_config, model_path)
    with files.written(tensors) as folder: ...                     # vLLM loads it from there
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from workers.models.classes import meta_class
from workers.models.folder import read_hf_config
from workers.models.lora import add_adapter, save_adapter
from workers.models.state import is_adapter
from workers.rollout.vllm.setup import ExpectedWeights
from workers.weights.full_weights import (
    ExpectedTensors,
    NumberedTensor,
    checksum_of,
    checksum_of_hashes,
    float32_hash,
)

if TYPE_CHECKING:
    from workers.config import ModelConfig


@dataclass
class Arrivals:
    """One vLLM process's report of a load: tensors with no place in its model, and damaged ones."""

    unplaced: dict[str, str] = field(default_factory=dict)
    """By name of the tensor: vLLM's message."""
    changed: list[str] = field(default_factory=list)


def by_layer(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors of a layer together, and other tensors one by one.

    They are copied, because the memory of a tensor may be reused when the next one is requested.
    """
    for layer, members in groupby(tensors, lambda named: _layer_of(named[0])):
        copies = ((name, tensor.detach().clone()) for name, tensor in members)
        if layer is None:
            yield from ([copy] for copy in copies)
        else:
            yield list(copies)


def _layer_of(name: str) -> str | None:
    """Return the name up to its first number, such as `model.layers.7`; None without a number."""
    match = re.match(r"(.*?\.\d+)\.", name)
    return None if match is None else match[1]


class Handover:
    """Records the names, shapes and hashes of the weights that are sent in one load."""

    def __init__(self, expected: ExpectedWeights) -> None:
        self.expected = expected
        self._hashes: dict[str, NumberedTensor] = {}
        self._arriving = ExpectedTensors(expected.shapes)

    def checkpoint_tensors(
        self, tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that fit the model, with the names and layout of a checkpoint."""
        return self.expected.checkpoint.stored(self._fitting(tensors))

    def _fitting(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for sent_name, tensor in tensors:
            name = self.expected.tied.get(sent_name, sent_name)
            if self._arriving.fits(name, tensor):
                self._hashes[name] = tensor.shape, float32_hash(tensor)
                if name not in self.expected.unread:
                    yield name, tensor

    def verify(self, arrivals: list[Arrivals]) -> None:
        """Raise a `WeightSyncError` that lists all problems, if there are any.

        A tensor counts as unplaced only if no rank has a place for it, because with expert
        parallelism a rank has only its own experts.
        """
        unplaced = set.intersection(*(set(rank.unplaced) for rank in arrivals))
        words = arrivals[0].unplaced
        self._arriving.verify(
            "engine",
            **{
                "that vLLM's model has no place for": [f"{n}{words[n]}" for n in sorted(unplaced)],
                "changed on their way": sorted({n for rank in arrivals for n in rank.changed}),
            },
        )

    def checksum(self) -> str:
        """Return the checksum of the sent weights, under the names of the trainer's module."""
        return checksum_of_hashes(self._hashes)


class AdapterFiles:
    """Writes the adapters of one run to files."""

    def __init__(self, config: ModelConfig, model_path: str) -> None:
        self.config = config
        self.module = meta_class(read_hf_config(model_path))
        add_adapter(self.module, config)
        named = self.module.named_parameters()
        self.shapes = {name: tensor.shape for name, tensor in named if is_adapter(name)}
        self.num_elements = sum(shape.numel() for shape in self.shapes.values())
        self.checksum = "no adapter has arrived"

    @contextmanager
    def written(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Path]:
        """Context in which the adapter is in a folder; `tensors` have the actor's names.

        Raise a `WeightSyncError` if tensors are missing or do not fit.
        """
        arrived = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
        expected = ExpectedTensors(self.shapes)
        for name, tensor in arrived.items():
            expected.fits(name, tensor)
        expected.verify("adapter")
        self.checksum = checksum_of(arrived.items())
        with tempfile.TemporaryDirectory(prefix="verl-like-adapter-") as folder:
            save_adapter(Path(folder), self.module, self.config, arrived.items())
            yield Path(folder)
