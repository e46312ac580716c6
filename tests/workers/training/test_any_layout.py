"""A checkpoint of ranks in any layout resumes on ranks in any other, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from tests.integration import axes
from tests.workers import distributed
from tests.workers.kept_ranks import run_kept
from tests.workers.samples import make_batch, own_chunk, started, tiny_config
from tests.workers.training.rank_layouts import NUM_ROWS, saved
from workers.config import ParallelConfig
from workers.models.state import local_shard
from workers.parallel.fsdp import full_tensor
from workers.roles.actor import ActorWorker
from workers.training.checkpoints.save_load import averages, optimizer_state, weights

LAYOUTS = {"one process": axes.Layout(1, ()), **axes.LAYOUTS}
del LAYOUTS["ep x tp"]
State = dict[str, torch.Tensor]
Saved = dict[str, tuple[State, str]]


def actor_over(folder: Path, parallel: ParallelConfig, lora_rank: int = 0) -> ActorWorker:
    """Return an actor with a moving average, whose checkpoints have an export."""
    settings = {"ppo_mini_batch_size": NUM_ROWS, "ema_decay": 0.5}
    config = tiny_config(folder, parallel, {"lora_rank": lora_rank}, **settings)
    config.actor_rollout_ref.actor.checkpoint.save_contents.append("hf_model")
    actor: ActorWorker = started(ActorWorker, config, 10)
    return actor


def state_of(actor: ActorWorker) -> State:
    """Return all tensors of a checkpoint, whole."""
    state = weights(actor.engine) | optimizer_state(actor.engine) | averages(actor.average)
    return {name: full_tensor(tensor).clone() for name, tensor in state.items()}


def updated_and_saved(
    folder: Path, parallel: ParallelConfig, lora_rank: int, into: str = "first"
) -> tuple[State, str]:
    """Return the state after an update, which is saved, and the hash of the weights.

    Ranks that store the same shard of a weight have the same bits of it.
    """
    actor = actor_over(folder, parallel, lora_rank)
    data = make_batch(NUM_ROWS)
    dims = actor.engine.dims
    actor.update_actor(own_chunk(data, dims.data_rank(actor.rank), dims.data_size))
    actor.save_checkpoint(str(folder / into))
    for weight in actor.engine.parameters():
        if isinstance(weight, DTensor) and weight.placements[-1].is_replicate():
            shard, group = local_shard(weight), actor.engine.groups.tp
            of_ranks = [torch.empty_like(shard) for _ in range(dims.tp)]
            torch.distributed.all_gather(of_ranks, shard, group=group)
            assert all(other.equal(shard) for other in of_ranks)
    return state_of(actor), actor.weights_checksum()


def resumed(
    folder: Path, parallel: ParallelConfig, lora_rank: int, name: str, into: str
) -> tuple[State, str]:
    """Return the state and hash of an actor that resumed, and save it under another name."""
    actor = actor_over(folder, parallel, lora_rank)
    actor.load_checkpoint(str(folder / name))
    actor.save_checkpoint(str(folder / into))
    return state_of(actor), actor.weights_checksum()


def whole(of_ranks: list[tuple[State, str]]) -> tuple[State, str]:
    """Merge the weights of ranks; each stage has its own layers."""
    (checksum,) = {checksum for _, checksum in of_ranks}
    merged: State = {}
    for state, _ in of_ranks:
        for name, tensor in state.items():
            assert merged.setdefault(name, tensor).equal(tensor), name
    return merged, checksum


def assert_equal(state: State, expected: State) -> None:
    assert state.keys() == expected.keys()
    assert all(state[name].equal(tensor) for name, tensor in expected.items())


@pytest.mark.long
@pytest.mark.parametrize("lora_rank", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_a_checkpoint_resumes_on_every_axis_bit_for_bit(tmp_path: Path, lora_rank: int) -> None:
    folder = saved(tmp_path, "qwen3-moe", num_hidden_layers=5)
    first = run_kept(2, updated_and_saved, folder, ParallelConfig(tp=2), lora_rank)
    expected, checksum = whole(first)
    assert len(expected) > 3 * len([name for name in expected if name.startswith("model.")])
    chain: tuple[dict[str, Any], ...] = (
        {"pp": 2},
        {"ep": 2},
        {"pp": 2, "pp_schedule": "interleaved"},
        {"shard": 2},
        {},
    )
    names = ["first", *(str(place) for place in range(len(chain)))]
    for over, name, into in zip(chain, names, names[1:], strict=False):
        arguments = folder, ParallelConfig(**over), lora_rank, name, into
        results = run_kept(2, resumed, *arguments) if over else [resumed(*arguments)]
        state, merged_checksum = whole(results)
        assert merged_checksum == checksum
        assert_equal(state, expected)
    exports = [load_file(folder / name / "huggingface" / "model.safetensors") for name in names]
    for export in exports[1:]:
        assert_equal(export, exports[0])


def over_ranks(layout: str, function: Any, folder: Path, *args: Any) -> list[Any]:
    num_ranks, of_ranks, _ = LAYOUTS[layout]
    pairs = (axis.split("=") for axis in of_ranks)
    parallel = ParallelConfig(**{name: int(size) for name, size in pairs})
    return distributed.run(num_ranks, function, folder, parallel, *args, deadline_s=150)


def resumed_from(folder: Path, parallel: ParallelConfig, names: list[str]) -> Saved:
    """Return an actor's state and hash after a resume from each of these checkpoints."""
    actor, by_name = actor_over(folder, parallel), {}
    for name in names:
        actor.load_checkpoint(str(folder / name))
        by_name[name] = state_of(actor), actor.weights_checksum()
    return by_name


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Saved]:
    """A checkpoint of every layout after an update, in folders of their names."""
    folder = saved(tmp_path_factory.mktemp("layouts"), "qwen3-moe")
    of_layouts = {
        name: whole(over_ranks(name, updated_and_saved, folder, 0, name)) for name in LAYOUTS
    }
    return folder, of_layouts


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_resumes_from_all_others(layout: str, checkpoints: tuple[Path, Saved]) -> None:
    folder, expected = checkpoints
    of_ranks = over_ranks(layout, resumed_from, folder, [*expected])
    for name, (state, checksum) in expected.items():
        merged, merged_checksum = whole([by_name[name] for by_name in of_ranks])
        assert merged_checksum == checksum
        assert_equal(merged, state)
