"""What all ranks of a group save alike for the backward pass, each keeps a part of.

    with kept_in_parts(group, weights, states, only_states=False):
        ...                                     # a layer's forward pass

Hidden states between layers that are cut over the ranks are whole on each. What a layer saves of
them is gathered when its backward pass asks for it, as Megatron-LM's
`distribute_saved_activations` does with what its checkpoints save.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

LEAST_BYTES = 2**16
"""Smaller tensors stay whole: a part of them saves less than its gathering costs."""
PART = "_kept_part"
"""Attribute of states that several layers read: the part that these share."""


class _Part:
    """A rank's part of a tensor, and from its first reader's backward pass to its last's, all."""

    def __init__(self, tensor: Tensor, group: dist.ProcessGroup) -> None:
        self.group, self.version = group, tensor._version
        self.own = tensor.view(group.size(), -1)[group.rank()].clone()
        self.num_readers = self.num_read = 0
        self.whole: Tensor | None = None

    def read(self, shape: torch.Size) -> Tensor:
        """The whole."""
        whole = self.whole
        if whole is None:
            whole = self.own.new_empty(self.group.size() * len(self.own))
            dist.all_gather(list(whole.chunk(self.group.size())), self.own, group=self.group)
        self.num_read += 1
        self.whole = whole if self.num_read % self.num_readers else None
        return whole.view(shape)


class _Layer:
    """What one layer saves; all that it holds is let go when the layer is done.

    (Autograd holds the function that packs as long as what it has packed.)
    """

    def __init__(self, group: dist.ProcessGroup, states: Tensor, only_states: bool) -> None:
        self.group, self.only_states = group, only_states
        self.states: Tensor | None = states
        self.weights: set[int] = set()
        self.found: list[tuple[Tensor, _Part]] = []
        """With the tensors, whose memory no other gets meanwhile."""

    def pack(self, tensor: Tensor) -> Any:
        """The tensor, or its part and its shape."""
        storage = tensor.untyped_storage()
        if (
            (self.only_states and not _are_same(tensor, self.states))
            or storage.data_ptr() in self.weights
            or not LEAST_BYTES <= storage.nbytes() == tensor.nbytes
            or not tensor.is_contiguous()
            or tensor.numel() % self.group.size()
        ):
            return tensor
        part = self._part_of(tensor)
        part.num_readers += 1
        return part, tensor.shape

    def _part_of(self, tensor: Tensor) -> _Part:
        part: Any
        if _are_same(tensor, self.states):
            part = getattr(self.states, PART, None)
            if part is None or part.version != tensor._version:
                part = _Part(tensor, self.group)
                setattr(self.states, PART, part)
            return part
        for other, part in self.found:
            if _are_same(tensor, other):
                return part
        self.found.append((tensor, _Part(tensor, self.group)))
        return self.found[-1][1]


def _unpack(kept: Any) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept[0].read(kept[1])


@contextmanager
def kept_in_parts(
    group: dist.ProcessGroup, weights: Iterable[Tensor | None], states: Tensor, only_states: bool
) -> Iterator[None]:
    """Within, `states` are saved in parts, and unless `only_states` all else but weights.

    What is saved so must be equal on all ranks of the group.
    """
    layer = _Layer(group, states, only_states)
    layer.weights = {w.untyped_storage().data_ptr() for w in weights if w is not None}
    with saved_tensors_hooks(layer.pack, _unpack):
        yield
    layer.states = None
    layer.found.clear()


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of whole memories have one, unchanged in between."""
    return (one.data_ptr(), one.dtype, one._version) == (
        other.data_ptr(),
        other.dtype,
        other._version,
    )
