"""Weights that follow other weights.

`WeightAverage` is the policy's moving average for validation (`actor.ema_decay`).
`MovingAverageTrainEngine` is a frozen model that follows another one: the reference with
`ref.update_every`, or a generator's copy of the critic. Its weights arrive whole and by name, as
for a rollout engine (`workers.weights.sync`), whatever the sharding on either side.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from workers.models.state import local_rows, local_shard, named_state, persistent_buffers
from workers.models.tensor_files import WRITE_NOW
from workers.training.checkpoints.background_copies import FileCopies
from workers.training.checkpoints.shards import Ranks, read_shards, write_on_all
from workers.training.engine import TrainEngine
from workers.weights.full_weights import ExpectedTensors


class WeightAverage:
    """Exponential moving average of a module's trained weights, in float32.

    Each rank stores the average of its shards.

    `ActorWorker` updates it after every update and swaps it in for a validation. Frozen weights and
    buffers are not averaged.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.module, self.decay = module, decay
        self.tensors = {name: weight.float().clone() for name, weight in self._weights().items()}
        self.put_aside: dict[str, Tensor] = {}
        """The trained weights, while the average is swapped in."""

    @torch.no_grad()
    def update(self) -> None:
        """Set the average to decay x average + (1 - decay) x weights."""
        for name, weight in self._weights().items():
            average = local_shard(self.tensors[name])
            new = local_shard(weight).to(average.device, average.dtype)
            average.lerp_(new, 1.0 - self.decay)

    def swap_in(self) -> None:
        """Replace the module's weights by the average; `swap_out` restores them."""
        weights = self._weights()
        self.put_aside = {name: weight.clone() for name, weight in weights.items()}
        _copy(self.tensors, weights)

    def swap_out(self) -> None:
        """Restore the trained weights, bit for bit."""
        _copy(self.put_aside, self._weights())
        self.put_aside = {}

    def restart(self) -> None:
        """Reset the average to the current weights."""
        _copy(self._weights(), self.tensors)

    def _weights(self) -> dict[str, Tensor]:
        named = self.module.named_parameters()
        return {name: weight.detach() for name, weight in named if weight.requires_grad}


@torch.no_grad()
def _copy(source: dict[str, Tensor], target: dict[str, Tensor]) -> None:
    for name, tensor in source.items():
        local_shard(target[name]).copy_(local_shard(tensor))


class MovingAverageTrainEngine(TrainEngine):
    """A frozen engine; its weights become `decay` x weights + (1 - `decay`) x received weights.

    In a narrower dtype than float32, a small step would round to zero, so a float32 average is
    stored next to each such weight unless `decay` is 0. Buffers are copied.
    """

    def __init__(self, *args: Any, decay: float, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.decay = decay
        self.version: int | None = None
        """Version of the weights; None until every rank has confirmed them."""
        self.averages: dict[str, Tensor] = {}
        """Name -> float32 average of a weight that is stored in a narrower dtype."""

    def build(self, worker: Any, total_steps: int = 0) -> None:
        """Build the model, and create float32 averages of weights in narrower dtypes."""
        super().build(worker, total_steps)
        for name, parameter in self.module.named_parameters():
            if self.decay > 0 and parameter.dtype != torch.float32:
                self.averages[name] = parameter.detach().float()

    @torch.no_grad()
    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Move the weights toward these full tensors; raise if one does not fit this model."""
        self.version = None
        targets = dict(named_state(self.module))
        buffers = {name for name, _ in persistent_buffers(self.module)}
        elsewhere = dict(named_state(self.whole_module)).keys() - targets.keys()
        expected = ExpectedTensors({name: weight.shape for name, weight in targets.items()})
        for name, tensor in tensors:
            if name in elsewhere or not expected.fits(name, tensor):
                continue
            if name in buffers:
                targets[name].copy_(tensor)
            else:
                self._move(name, targets[name], tensor)
        expected.verify("frozen model")

    def _move(self, name: str, weight: Tensor, target: Tensor) -> None:
        """Move this rank's rows of one parameter toward the whole weight."""
        average = local_shard(self.averages.get(name, weight))
        new = local_rows(weight, target).to(average.device, average.dtype)
        if self.decay == 0:
            average.copy_(new)
        else:
            average.lerp_(new, 1.0 - self.decay)
        if name in self.averages:
            local_shard(weight).copy_(average)

    def commit(self, version: int) -> None:
        self.version = version

    def save(self, folder: Path, copies: FileCopies | None = None) -> None:
        """Write the weights into `folder`, or copy them to be written later.

        Collective: every rank must call this.
        """
        name = f"the frozen copy of {self.model_config.path}"
        ranks = Ranks(self.groups.world, f"{name} was not written into {folder}")
        tensors, writer = self.without_copies(self._saved()), copies or WRITE_NOW
        write_on_all(ranks, tensors, folder, self.groups.stage, writer)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Load the weights that any number of ranks wrote into `folder`.

        Collective: every rank must call this.
        """
        name = f"the frozen copy of {self.model_config.path}"
        ranks = Ranks(self.groups.world, f"{name} was not loaded from {folder}")
        ranks.run_on_all(lambda: read_shards(self._saved(), folder))
        weights = dict(self.module.named_parameters())
        for name, average in self.averages.items():
            local_shard(weights[name]).copy_(local_shard(average))

    def _saved(self) -> dict[str, Tensor]:
        state = {name: weight.detach() for name, weight in named_state(self.module)}
        return state | self.averages
