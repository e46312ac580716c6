"""One load of a vLLM engine: transfer the trainer's weights to vLLM's processes.

    handover = Handover(expected_weights(model_path))
    for name, tensor in handover.checkpoint_tensors(tensors): ...  # by the checkpoint's names
    handover.verify(arrivals)                                      # reports of vLLM's ranks

The trainer names weights as its module does, and the checksum uses these names. vLLM expects the
tensors of checkpoints, in which the experts of a layer are separate.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

from torch import Tensor

from workers.rollout.vllm.setup import ExpectedWeights
from workers.weights.checksum import NumberedTensor, checksum_of_hashes, float32_hash
from workers.weights.module_writer import ExpectedTensors


@dataclass
class Arrivals:
    """Tensors that do not exist in one vLLM process, or that arrived changed."""

    unplaced: dict[str, str] = field(default_factory=dict)
    """Name -> vLLM's message."""
    changed: list[str] = field(default_factory=list)


def by_layer(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield copies of consecutive tensors of a layer together, and other tensors one by one.

    The memory of a tensor may be reused once the next one is asked for.
    """
    for layer, members in groupby(tensors, lambda named: _layer_of(named[0])):
        copies = ((name, tensor.detach().clone()) for name, tensor in members)
        if layer is None:
            yield from ([copy] for copy in copies)
        else:
            yield list(copies)


def _layer_of(name: str) -> str | None:
    """Return the name of the layer whose number comes first, such as `model.layers.7`."""
    match = re.match(r"(.*?\.\d+)\.", name)
    return None if match is None else match[1]


class Handover:
    """The record of one load."""

    def __init__(self, expected: ExpectedWeights) -> None:
        self.expected = expected
        self._hashes: dict[str, NumberedTensor] = {}
        self._arriving = ExpectedTensors(expected.shapes)

    def checkpoint_tensors(
        self, tensors: Iterable[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that fit, as in a checkpoint."""
        return self.expected.checkpoint.stored(self._fitting(tensors))

    def _fitting(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for sent_name, tensor in tensors:
            name = self.expected.tied.get(sent_name, sent_name)
            if self._arriving.fits(name, tensor):
                self._hashes[name] = tensor.shape, float32_hash(tensor)
                yield name, tensor

    def verify(self, arrivals: list[Arrivals]) -> None:
        """Raise a `WeightSyncError` that lists all problems.

        With expert parallelism a rank has places only for its own experts.
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
        """Return the checksum of the weights as sent, by the module's names."""
        return checksum_of_hashes(self._hashes)
