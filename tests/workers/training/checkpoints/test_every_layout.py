"""Every strategy over all axes and replicas that it accepts: saved, loaded elsewhere, resumed."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tests.workers import distributed
from tests.workers.kept_ranks import process_set_back
from tests.workers.samples import make_batch, own_chunk, started, tiny_config, weights_of
from tests.workers.training.rank_layouts import NUM_ROWS, distance, saved
from verl_like.errors import ConfigError
from workers.config import FSDPConfig, OptimConfig, ParallelConfig
from workers.config.model import STRATEGIES
from workers.parallel.fsdp import full_tensor
from workers.parallel.sharding import dims_of, resolve_sharding
from workers.roles.actor import ActorWorker
from workers.training.checkpoints.save_load import averages, optimizer_state, weights

State = dict[str, torch.Tensor]
Axes = dict[str, int]


def layouts(strategy: str, num_ranks: int) -> dict[str, Axes]:
    """Return the axes that a strategy accepts on so many ranks, by the layout that they give."""
    by_layout: dict[str, Axes] = {}
    sizes = [size for size in (1, 2, 4) if size <= num_ranks]
    for pp, sp, tp, ep, shard in itertools.product((1, 2), (1, 2), (1, 2), (1, 2), sizes):
        axes = {"pp": pp, "sp": sp, "tp": tp, "ep": ep, "shard": shard}
        try:
            sharding = resolve_sharding(strategy, FSDPConfig(), ParallelConfig(**axes))
            dims = dims_of(num_ranks, sharding)
        except ConfigError:
            continue
        by_layout[f"{dims.axes()} ep {ep}"] = axes
    return by_layout


def actor_over(folder: Path, strategy: str, axes: Axes) -> ActorWorker:
    settings = {"ppo_mini_batch_size": NUM_ROWS, "ema_decay": 0.5, "strategy": strategy}
    config = tiny_config(folder, ParallelConfig(**axes), **settings)
    config.actor_rollout_ref.actor.optim = OptimConfig(lr=1e-4, eps=1e-4)
    actor: ActorWorker = started(ActorWorker, config, 10)
    return actor


def update(actor: ActorWorker) -> None:
    dims = actor.engine.dims
    actor.update_actor(own_chunk(make_batch(NUM_ROWS), dims.data_rank(actor.rank), dims.data_size))


def state_of(actor: ActorWorker) -> State:
    """Return all tensors of a checkpoint of this rank's layers, whole."""
    state = weights(actor.engine) | optimizer_state(actor.engine) | averages(actor.average)
    return {name: full_tensor(tensor).clone() for name, tensor in state.items()}


def resumed(folder: Path, strategy: str, of_layouts: dict[str, Axes], first: State) -> list[State]:
    """Return the weights after an update from each layout's resume.

    A layout resumes the checkpoint that the layout before it saved, and saves it again.
    """
    updated, name = [], "first"
    for place, (layout, axes) in enumerate(of_layouts.items()):
        actor = actor_over(folder, strategy, axes)
        actor.load_checkpoint(str(folder / name))
        name = str(place)
        actor.save_checkpoint(str(folder / name))
        state = state_of(actor)
        assert state.keys() <= first.keys()
        other = [tensor for tensor in state if not state[tensor].equal(first[tensor])]
        assert not other, f"{layout}: {other}"
        update(actor)
        updated.append(weights_of(actor))
    return updated


BY_SHARDING = {sharding: strategy for strategy, sharding in STRATEGIES.items()}


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("strategy", [name for name in BY_SHARDING.values() if name != "single"])
def test_a_strategy_resumes_in_every_layout_that_it_accepts(
    tmp_path: Path, strategy: str, num_ranks: int
) -> None:
    of_layouts = layouts(strategy, num_ranks)
    saved(tmp_path, "qwen3-moe", num_hidden_layers=3)
    with process_set_back():
        actor = actor_over(tmp_path, "single", {})
        update(actor)
        actor.save_checkpoint(str(tmp_path / "first"))
        first = state_of(actor)
        update(actor)
        expected = weights_of(actor)

    results = distributed.run(
        num_ranks, resumed, tmp_path, strategy, of_layouts, first, deadline_s=300
    )
    for of_rank in results:
        for layout, found in zip(of_layouts, of_rank, strict=True):
            assert distance(found, expected) < 1e-6, layout
    with process_set_back():
        actor = actor_over(tmp_path, "single", {})
        actor.load_checkpoint(str(tmp_path / str(len(of_layouts) - 1)))
        assert all(tensor.equal(first[name]) for name, tensor in state_of(actor).items())
