"""One load of a vLLM engine: the trainer's weights on their way to vLLM's processes.

    handover = Handover(expected_weights(model_path))
    for name, tensor in handover.pieces(tensors): ...      # by checkpoint's names, to vLLM
    handover.verify(arrivals)                              # what each rank of vLLM reports

The trainer names weights as its module does, and so does the checksum that it compares. vLLM takes
what checkpoints hold, where the experts of a layer are tensors of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from workers.rollout.vllm.setup import ExpectedWeights
from workers.weights.checksum import NumberedTensor, checksum_of_hashes, float32_hash
from workers.weights.module_writer import refuse_problems


@dataclass
class Arrivals:
    """What one process of vLLM had no place for, or did not get as it was sent."""

    unplaced: dict[str, str] = field(default_factory=dict)
    """Name -> vLLM's words."""
    changed: list[str] = field(default_factory=list)


class Handover:
    """The account of one load."""

    def __init__(self, expected: ExpectedWeights) -> None:
        self.expected = expected
        self._hashes: dict[str, NumberedTensor] = {}
        self._unknown: list[str] = []
        self._unfit: list[str] = []

    def pieces(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors that fit, as a checkpoint has them."""
        return self.expected.checkpoint.stored(self._fitting(tensors))

    def _fitting(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for sent_name, tensor in tensors:
            name = self.expected.tied.get(sent_name, sent_name)
            shape = self.expected.shapes.get(name)
            if shape is None:
                self._unknown.append(name)
                continue
            self._hashes[name] = tensor.shape, float32_hash(tensor)
            if shape == tensor.shape:
                yield name, tensor
            else:
                self._unfit.append(f"{name} (is {list(shape)}, was sent {list(tensor.shape)})")

    def verify(self, arrivals: list[Arrivals]) -> None:
        """A `WeightSyncError` lists all that is wrong.

        With expert parallelism a rank has a place for its own experts alone.
        """
        unplaced = set.intersection(*(set(rank.unplaced) for rank in arrivals))
        words = arrivals[0].unplaced
        refuse_problems(
            "engine",
            missing=[name for name in self.expected.shapes if name not in self._hashes],
            unknown=self._unknown,
            **{
                "of another shape": self._unfit,
                "that vLLM's model has no place for": [f"{n}{words[n]}" for n in sorted(unplaced)],
                "changed on their way": sorted({n for rank in arrivals for n in rank.changed}),
            },
        )

    def checksum(self) -> str:
        """The checksum of the weights as they were handed over, by the module's names."""
        return checksum_of_hashes(self._hashes)
