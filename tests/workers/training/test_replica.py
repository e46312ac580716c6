"""What ranks that live write of a role's state, and what a group made anew goes on with."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.kept_ranks import run_kept
from tests.workers.samples import learned, make_batch, own_piece, started, tiny_config
from verl_like.errors import CheckpointError
from workers.config import FSDPConfig, OptimConfig
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.training.manifest import write_manifest
from workers.training.refresh import own_part

ROWS = 4


def worker_of(cls: type, one_layer_dir: Path, strategy: str, fsdp_size: int) -> Any:
    config = tiny_config(
        one_layer_dir,
        strategy=strategy,
        fsdp_config=FSDPConfig(fsdp_size=fsdp_size),
        ema_decay=0.5,
        optim=OptimConfig(lr=1e-2, lr_scheduler_type="cosine"),
        ppo_mini_batch_size=ROWS,
    )
    config.critic.strategy = strategy
    config.critic.model.fsdp_config = FSDPConfig(fsdp_size=fsdp_size)
    config.critic.ppo_mini_batch_size = ROWS
    return started(cls, config, 10)


def update(worker: Any, seed: int) -> dict[str, float]:
    batch = own_piece(make_batch(ROWS, seed), worker.rank, worker.world_size)
    method = worker.update_actor if isinstance(worker, ActorWorker) else worker.update_critic
    return learned(method(batch))


def go_on(worker: Any) -> tuple[Any, ...]:
    """Metrics of an update, weights after it, and this rank's part of their average."""
    average = [] if worker.average is None else worker.average.tensors.values()
    metrics = update(worker, 1)
    averages = [float(own_part(tensor).double().sum()) for tensor in average]
    return metrics, worker.weights_checksum(), averages


def write_and_go_on(
    cls: type, one_layer_dir: Path, folder: Path, ranks: list[int], *sharding: Any
) -> Any:
    """An update, what these ranks have written of it, and what another one gives."""
    worker = worker_of(cls, one_layer_dir, *sharding)
    update(worker, 0)
    part = worker.save_replica(str(folder), ranks)
    return part, *go_on(worker)


def load_and_go_on(cls: type, one_layer_dir: Path, folder: Path, *sharding: Any) -> Any:
    """What the same update of a worker made anew gives."""
    worker = worker_of(cls, one_layer_dir, *sharding)
    worker.load_checkpoint(str(folder))
    return go_on(worker)


@pytest.mark.parametrize(
    ("cls", "world", "ranks", "sharding"),
    [
        (ActorWorker, 2, [1], ("ddp", -1)),
        (CriticWorker, 2, [0], ("ddp", -1)),
        (ActorWorker, 4, [2, 3], ("fsdp", 2)),
    ],
)
def test_a_group_made_anew_goes_on_bit_for_bit(
    one_layer_dir: Path,
    tmp_path: Path,
    cls: type,
    world: int,
    ranks: list[int],
    sharding: tuple[str, int],
) -> None:
    found = run_kept(world, write_and_go_on, cls, one_layer_dir, tmp_path, ranks, *sharding)
    parts = [part for part, *_ in found]
    assert [rank for rank, part in enumerate(parts) if part is not None] == ranks
    files = sorted(path.name for path in (tmp_path / "shards").iterdir())
    assert files == [f"{rank}.safetensors" for rank in ranks]

    write_manifest(tmp_path, [parts[rank] for rank in ranks])
    again = run_kept(world, load_and_go_on, cls, one_layer_dir, tmp_path, *sharding)
    assert again == [tuple(rest) for _, *rest in found]


def leave(one_layer_dir: Path, folder: Path) -> Any:
    """Rank 0 leaves; the part that the other one writes without it."""
    worker = worker_of(ActorWorker, one_layer_dir, "ddp", -1)
    return None if os.environ["RANK"] == "0" else worker.save_replica(str(folder), [1])


def test_nobody_waits_for_the_other_ranks(one_layer_dir: Path, tmp_path: Path) -> None:
    nothing, part = run_kept(2, leave, one_layer_dir, tmp_path)
    assert nothing is None
    assert part["contents"] == ["model", "optimizer", "extra"]
    assert part["num_ranks"] == 1


def test_a_role_that_has_drawn_random_numbers_is_refused(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    worker = worker_of(ActorWorker, one_layer_dir, "single", -1)
    assert worker.save_replica(str(tmp_path / "before"), [0]) is not None
    torch.rand(())
    with pytest.raises(CheckpointError, match="draws random numbers while it learns"):
        worker.save_replica(str(tmp_path / "after"), [0])
