"""Several trained states in one engine, such as adapters of several clients or copies of a model.

    states = TrainedStates(engine)
    states.add("alice", rank=8)         # new adapters; without adapters, a copy of the model
    states.use("alice")                 # passes, steps and checkpoints now belong to Alice
    states.copy("alice", "snapshot")    # only the weights, without gradients and moments
    states.drop("alice")

A state consists of weights, gradients, optimizer moments and counts. Only one state is in the
module at a time, so computations for different states are independent. On an unsharded model,
states are swapped without copying, and adapters may differ in LoRA rank. On a sharded model, the
shards are overwritten. The state `BASE` is the model as loaded; do not train it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from verl_like.errors import ConfigError, nearest
from workers.models.lora import NAME, adapted_layers, initial_value
from workers.models.state import is_adapter, local_rows, local_shard
from workers.training.engine import TrainEngine

BASE = ""
"""The name of the model as loaded."""


@dataclass
class TrainedState:
    """Trained tensors by parameter name, while they are not in the module."""

    rank: int
    weights: dict[str, Tensor]
    frozen: frozenset[str] = frozenset()
    """Names of the parameters that no step changes."""
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    moments: dict[Any, Any] = field(default_factory=dict)
    has_gradients: bool = False
    gradient_rows: list[str] = field(default_factory=list)
    skipped: tuple[int, int] = (0, 0)


class TrainedStates:
    """The states of one engine on this rank; every rank makes the same calls."""

    def __init__(self, engine: TrainEngine) -> None:
        self.engine = engine
        named = engine.module.named_parameters()
        self.parameters = {name: weight for name, weight in named if weight.requires_grad}
        self.rank: int = engine.model_config.lora_rank
        self.alpha = engine.model_config.lora_alpha
        self.states = {BASE: TrainedState(self.rank, {})}
        self.current = BASE

    def add(
        self, name: str, rank: int, seed: int | None = None, frozen: frozenset[str] = frozenset()
    ) -> None:
        """Add a state with the base's weights; new adapters have this LoRA rank and seed."""
        if name in self.states:
            raise ConfigError(f"a state named {name!r} already exists. Choose another name.")
        if (rank == 0) != (self.rank == 0):
            kind = "adapters (lora_rank > 0)" if self.rank else "all weights (lora_rank=0)"
            raise ConfigError(f"this model trains {kind}, so it cannot add a state of rank {rank}.")
        if rank != self.rank and not self.engine.is_whole:
            raise ConfigError(
                f"cannot add an adapter of rank {rank}: all adapters of a sharded model have the "
                f"same rank, here {self.rank}. Use rank {self.rank}, or start the model with "
                f"{self.engine.model_config.SECTION}.lora_rank={rank}."
            )
        weights = self._clones(BASE)
        weights.update(self._adapters(rank, seed) if rank else {})
        self.states[name] = TrainedState(rank, weights, frozen)

    def copy(self, source: str, name: str) -> None:
        """Store the weights of `source` as the state `name`; if `name` is in use, use `source`."""
        state = self._state(source)
        if name == self.current:  # the next `use` would overwrite the copy
            self.use(source)
        self.states[name] = TrainedState(state.rank, self._clones(source), state.frozen)

    def drop(self, name: str) -> None:
        """Delete a state, unless it is the base."""
        if name == self.current:
            self.use(BASE)
        if name != BASE:
            self.states.pop(name, None)

    def use(self, name: str) -> None:
        """Load a state into the module, and store the previous one."""
        state, before = self._state(name), self.states[self.current]
        if name == self.current:
            return
        engine, optimizer, parameters = self.engine, self.engine.optimizer, self.parameters
        assert optimizer is not None, "a frozen engine has no states"
        before.weights = self._present() if engine.is_whole else self._clones(self.current)
        before.gradients = {key: weight.grad for key, weight in parameters.items()}
        before.moments = dict(optimizer.state)
        before.has_gradients, before.gradient_rows = (engine.has_gradients, engine.gradient_rows)
        before.skipped = engine.guard.total, engine.guard.in_a_row

        for key, weight in parameters.items():
            weight.grad = None
            if engine.is_whole:
                weight.data = state.weights[key]
            else:
                local_shard(weight).copy_(state.weights[key])
            weight.grad = state.gradients.get(key)
        optimizer.state.clear()
        optimizer.state.update(state.moments)
        engine.has_gradients, engine.gradient_rows = (state.has_gradients, state.gradient_rows)
        engine.guard.total, engine.guard.in_a_row = state.skipped
        if state.rank != engine.model_config.lora_rank:
            engine.model_config = replace(engine.model_config, lora_rank=state.rank)
            for layer in adapted_layers(engine.module).values():
                layer.r[NAME], layer.scaling[NAME] = state.rank, self.alpha / state.rank
        # another reference would keep the replaced tensors alive
        state.weights, state.gradients, state.moments = {}, {}, {}
        self.current = name

    def clear_gradients(self, forget_moments: bool = False) -> None:
        """Drop the gradients of the state in use, and its moments if `forget_moments`."""
        optimizer = self.engine.optimizer
        assert optimizer is not None, "a frozen engine has no states"
        optimizer.zero_grad(set_to_none=True)
        self.engine.has_gradients, self.engine.gradient_rows = False, []
        if forget_moments:
            optimizer.state.clear()

    @contextmanager
    def without_frozen(self) -> Iterator[None]:
        """Context in which a step does not change the frozen parameters of the state in use."""
        frozen = [self.parameters[name] for name in self.states[self.current].frozen]
        for weight in frozen:
            weight.grad = None
            weight.requires_grad_(False)
        try:
            yield
        finally:
            for weight in frozen:
                weight.requires_grad_(True)

    def _state(self, name: str) -> TrainedState:
        if name not in self.states:
            raise ConfigError(f"there is no state {name!r}.{nearest(name, self.states)}")
        return self.states[name]

    def _present(self) -> dict[str, Tensor]:
        return {name: local_shard(weight) for name, weight in self.parameters.items()}

    def _clones(self, name: str) -> dict[str, Tensor]:
        tensors = self._present() if name == self.current else self.states[name].weights
        return {key: tensor.clone() for key, tensor in tensors.items()}

    @torch.no_grad()
    def _adapters(self, rank: int, seed: int | None) -> dict[str, Tensor]:
        weights = {}
        adapters = {name: p for name, p in self.parameters.items() if is_adapter(name)}
        for name, weight in adapters.items():
            shape = list(weight.shape)
            if ".lora_A." in name:
                shape[0] = rank
            elif ".lora_B." in name:
                shape[1] = rank
            value = initial_value(name, torch.Size(shape), seed)
            rows = local_rows(weight, value) if rank == self.rank else value
            weights[name] = rows.to(weight.device, weight.dtype, copy=True)
        return weights
