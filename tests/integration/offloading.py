"""Roles that offload on CPUs like on GPUs: calls move their tensors to other memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from workers.parallel.placements import local_part
from workers.roles.actor import ActorWorker
from workers.training import sharded_model


@contextmanager
def resident(module: Any, optimizer: Any, *_: Any) -> Iterator[None]:
    """Replacement of the engine's method; reads of the old memory find NaN."""
    _move(module, optimizer)
    yield
    _move(module, optimizer)


def _move(module: Any, optimizer: Any) -> None:
    old: list[Tensor] = []

    def moved(tensor: Tensor) -> Tensor:
        old.append(local_part(tensor.detach()))
        return tensor.detach().clone()

    module._apply(moved)
    for state in (optimizer.state if optimizer is not None else {}).values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim() > 0:
                state[name] = moved(value)
    with torch.no_grad():
        for tensor in old:
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)


class OffloadingActor(ActorWorker):
    """Makes all roles of its process offload."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.world_size > 1:  # one process is that of the tests
            sharded_model.resident = resident
