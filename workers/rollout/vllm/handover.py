"""One load of a vLLM engine: the trainer's weights on their way to vLLM's processes.

    handover = Handover(expected_weights(model_path))
    for name, tensor in handover.pieces(tensors): ...      # by checkpoint's names, to vLLM
    checksums = handover.verify(arrivals)                  # what each rank of vLLM reports

The trainer names weights as its module does, and so does the checksum that it compares. vLLM takes
what checkpoints hold, where the experts of a layer are tensors of their own. What is cut on the way
is hashed before and after, so that the checksum is of what has arrived, under the trainer's names.
What vLLM's model then holds of it is read back (`workers.rollout.vllm.read_back`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from workers.rollout.vllm.read_back import Held
from workers.rollout.vllm.setup import ExpectedWeights
from workers.weights.checksum import byte_view, digest_of, hash_of
from workers.weights.module_writer import refuse_problems

Hash = tuple[list[int], int]
"""Shape, and hash of the float32 bytes."""


@dataclass(frozen=True)
class Arrivals:
    """What one process of vLLM was handed, and what its model had no place for."""

    hashes: dict[str, Hash]
    unplaced: dict[str, str] = field(default_factory=dict)
    """Name -> vLLM's words."""
    held: Held = Held()
    """What its model holds after the load."""


class Handover:
    """The account of one load."""

    def __init__(self, expected: ExpectedWeights) -> None:
        self.account = expected.account()
        self.checkpoint = expected.checkpoint
        self.cut: dict[str, Hash] = {}
        """Weights of the module that a checkpoint has in other pieces."""
        self.sent: dict[str, Hash] = {}
        """These pieces."""
        self.num_elements: dict[str, int] = {}
        """Of everything that was handed over."""

    def pieces(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors that fit, as a checkpoint has them."""
        kept = self.checkpoint.kept
        for name, tensor in self.checkpoint.stored(self._watch(tensors)):
            if name not in kept:
                self.sent[name] = hash_in_float32(tensor)
            self.num_elements[name] = tensor.numel()
            yield name, tensor

    def _watch(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.account.watch(tensors):
            if name not in self.checkpoint.kept:
                self.cut[name] = hash_in_float32(tensor)
            yield name, tensor

    def verify(self, arrivals: list[Arrivals]) -> list[str]:
        """Each rank's checksum by the module's names; a `WeightSyncError` lists all that is wrong.

        With expert parallelism a rank has a place for its own experts alone.
        """
        unplaced = set.intersection(*(set(rank.unplaced) for rank in arrivals))
        changed: set[str] = set()
        for rank in arrivals:
            changed |= {name for name in self.sent if rank.hashes.get(name) != self.sent[name]}
        words = arrivals[0].unplaced
        refuse_problems(
            "engine",
            missing=self.account.missing,
            unknown=self.account.extra,
            **{
                "of another shape": self.account.unfit,
                "that vLLM's model has no place for": [f"{n}{words[n]}" for n in sorted(unplaced)],
                "changed on their way": sorted(changed),
            },
        )
        return [self._checksum(rank.hashes) for rank in arrivals]

    def damaged(self, arrivals: list[Arrivals]) -> list[str]:
        """Names of what a rank holds otherwise than it was handed over."""
        return sorted({name for rank in arrivals for name in rank.held.damaged})

    def unread(self, arrivals: list[Arrivals]) -> list[str]:
        """Names of what the ranks do not hold, all together, as whole and unpacked bytes."""
        found = Counter[str]({name: self.num_elements[name] for name in self.damaged(arrivals)})
        for rank in arrivals:
            found.update(rank.held.num_elements)
        return [name for name, count in self.num_elements.items() if found[name] < count]

    def _checksum(self, hashes: dict[str, Hash]) -> str:
        whole = {name: found for name, found in hashes.items() if name not in self.sent}
        named = (whole | self.cut).items()
        return digest_of((name, shape, number) for name, (shape, number) in named)


def hash_in_float32(tensor: Tensor) -> Hash:
    """As `checksum_of` takes it."""
    payload = tensor.detach().float().cpu().contiguous()
    return list(tensor.shape), hash_of(byte_view(payload))
