"""A rollout's own copy of what the actor sent, in host memory: what has not changed stays here.

    announce(store, rank, kept.manifest)            # rollout: what this rank holds
    changes(store, num_receivers, merging)          # actor: what need not be sent
    engine.load_weights(kept.taken(...))            # rollout: what came, put to what was there

A manifest is dtype, shape and hash of every tensor. A LoRA layer is kept as base and factors, of
which the factors alone change; they are merged anew from the base at each version, so that nothing
accumulates.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.errors import WeightSyncError
from workers.models.adapters import PARTS, merged_weight, misfit
from workers.weights.channel import Changes, Channel, Manifest, dtype_of
from workers.weights.sink import describe_problems, refuse_problems

if TYPE_CHECKING:
    from workers.config import RolloutConfig


def announce(store: dist.Store, rank: int, manifest: Manifest) -> None:
    """Tell the sender what this receiver holds; before it joins the channel."""
    store.set(f"held/{rank}", json.dumps(manifest))


def changes(
    store: dist.Store, num_receivers: int, merging: dict[str, Any] | None
) -> Changes | None:
    """What the sender may leave out, once all receivers have joined: what they hold alike.

    Nothing where no `merging` says that changes are sent.
    """
    if merging is None:
        return None
    keys = [f"held/{rank}" for rank in range(1, num_receivers + 1)]
    if not store.check(keys):
        raise WeightSyncError(
            "the actor sends what has changed (actor_rollout_ref.rollout.sync=changed), and a "
            "rollout rank keeps no copy to put it to: they must be configured alike."
        )
    first, *others = (json.loads(store.get(key)) for key in keys)
    held: Manifest = {}
    for name, fact in first.items():
        if all(other.get(name) == fact for other in others):
            held[name] = fact
    return Changes(held, merging)


def kept_weights(config: RolloutConfig) -> KeptWeights | None:
    """A copy where the configuration asks for one."""
    if config.sync == "full" and not config.double_buffer:
        return None
    return KeptWeights(announces=config.sync == "changed")


def effective_tensors(
    tensors: Mapping[str, Tensor], merging: Mapping[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """The weights that these are: each adapter added to its base, cast as the actor would.

    `merging` holds "adapters", by layer, and "dtype", that of the rollout's weights.
    """
    dtype = dtype_of(merging["dtype"]) if merging["dtype"] else None
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        adapter = merging["adapters"].get(layer)
        if adapter is None or part not in PARTS:
            yield name, tensor
        elif part == "weight":
            a, b = tensors[f"{layer}.lora_A"], tensors[f"{layer}.lora_B"]
            merged = merged_weight(tensor, a, b, adapter["scaling"], adapter["transposed"])
            yield name, merged.to(tensor.dtype).to(dtype or tensor.dtype)


class KeptWeights:
    """What one rank of a rollout has been sent so far, verified."""

    def __init__(self, announces: bool) -> None:
        """`announces`: the sender is told what is held, and leaves that out."""
        self.announces = announces
        self.version: int | None = None
        """What is held, whole; None while it is arriving."""
        self.lock = threading.Lock()
        """Held while something arrives or is read."""
        self.tensors: dict[str, Tensor] = {}
        self.manifest: Manifest = {}
        self.merging: dict[str, Any] = {"adapters": {}, "dtype": None}

    def taken(
        self, channel: Channel, arriving: Iterator[tuple[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Take what arrives; then all weights, for the engine to load."""
        self.take(channel, arriving)
        yield from self.effective()

    def effective(self) -> Iterator[tuple[str, Tensor]]:
        """All weights, adapters merged."""
        return effective_tensors(self.tensors, self.merging)

    def take(self, channel: Channel, arriving: Iterator[tuple[str, Tensor]]) -> None:
        """Copy what arrives; a `WeightSyncError` where that and what was kept is not the whole.

        After an error all that may be damaged is sent again.
        """
        self.version = None
        for name, tensor in arriving:
            self.manifest.pop(name, None)
            own = self.tensors.get(name)
            if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
                self.tensors[name] = own = torch.empty_like(tensor)
            own.copy_(tensor)
        if self.announces and not channel.summary and not channel.corrupt:
            what = "what the whole is said to hold, if the actor sends changes at all"
            channel.corrupt.append(what)
        if channel.corrupt:
            self.manifest = {}
            raise WeightSyncError(describe_problems("transfer", corrupt=channel.corrupt))

        self.manifest |= channel.manifest
        whole: Manifest = channel.summary.get("manifest", channel.manifest)
        unsent = [name for name, fact in whole.items() if self.manifest.get(name) != fact]
        self.manifest = {name: whole[name] for name in whole if name not in unsent}
        self.tensors = {name: self.tensors[name] for name in self.manifest}
        refuse_problems("transfer", **{"neither sent nor held": unsent})
        if channel.summary:
            self.merging = channel.summary["merging"]
            self._check_adapters()

    def _check_adapters(self) -> None:
        missing, unfit = [], []
        for layer, adapter in self.merging["adapters"].items():
            parts = [f"{layer}.{part}" for part in PARTS]
            absent = [name for name in parts if name not in self.tensors]
            missing += absent
            if absent:
                continue
            base, a, b = (self.tensors[name] for name in parts)
            if misfit(base, a, b, adapter["transposed"]):
                shapes = " + ".join(str(list(tensor.shape)) for tensor in (base, b, a))
                unfit.append(f"{layer} (base, B, A: {shapes})")
        if missing or unfit:
            self.manifest = {}
        refuse_problems("adapters", missing=missing, **{"of another shape": unfit})
