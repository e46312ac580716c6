"""A checkpoint of any number of ranks becomes the folder that its run would have exported."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.workers.kept_ranks import run_kept
from tests.workers.samples import make_batch, own_chunk, started, tiny_config
from verl_like.errors import CheckpointError
from workers.config import ModelConfig, OptimConfig
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.training.checkpoints.export import export_checkpoint

CONTENTS = ["model", "optimizer", "hf_model"]


def save(
    cls: type,
    one_layer_dir: Path,
    folder: Path,
    lora_rank: int = 0,
    ema_decay: float | None = None,
    contents: Sequence[str] = CONTENTS,
) -> dict[str, torch.Tensor]:
    """Save a checkpoint after one update; return its moving average."""
    actor = {"ppo_mini_batch_size": 2, "optim": OptimConfig(lr=1e-2), "ema_decay": ema_decay}
    config = tiny_config(one_layer_dir, model={"lora_rank": lora_rank}, **actor)
    config.critic.ppo_mini_batch_size = 2
    config.critic.optim["lr"] = 1e-2
    for section in (config.actor_rollout_ref.actor, config.critic):
        section.checkpoint.save_contents = list(contents)

    worker = started(cls, config, 10)
    batch = own_chunk(make_batch(4, 0), worker.rank, worker.world_size)
    update = worker.update_actor if cls is ActorWorker else worker.update_critic
    update(batch)
    worker.save_checkpoint(str(folder), 1)
    return {} if worker.average is None else dict(worker.average.tensors)


def exported(
    one_layer_dir: Path, checkpoint: Path, out: Path, lora_rank: int = 0, **form: bool
) -> dict[str, torch.Tensor]:
    model = ModelConfig(path=str(one_layer_dir / "model"), lora_rank=lora_rank)
    export_checkpoint(checkpoint, model, out, settings={}, **form)
    return tensors_of(out)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def assert_equal(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert tensors.keys() == expected.keys()
    assert tensors
    assert all(tensor.equal(expected[name]) for name, tensor in tensors.items())


@pytest.mark.parametrize(("cls", "lora_rank"), [(ActorWorker, 4), (CriticWorker, 0)])
def test_an_export_equals_the_run_s_own_export(
    one_layer_dir: Path, tmp_path: Path, cls: type, lora_rank: int
) -> None:
    save(cls, one_layer_dir, tmp_path / "role", lora_rank)
    out = tmp_path / "out"
    tensors = exported(one_layer_dir, tmp_path / "role", out, lora_rank)
    by_run = tmp_path / "role" / "huggingface"
    assert_equal(tensors, tensors_of(by_run))
    assert {path.name for path in out.iterdir()} == {path.name for path in by_run.iterdir()}
    assert (out / "config.json").read_text() == (by_run / "config.json").read_text()


def test_one_process_exports_the_checkpoint_of_two_ranks(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    run_kept(2, save, ActorWorker, one_layer_dir, tmp_path / "actor")
    tensors = exported(one_layer_dir, tmp_path / "actor", tmp_path / "out")
    assert_equal(tensors, tensors_of(tmp_path / "actor" / "huggingface"))
    base = tensors_of(one_layer_dir / "model")
    assert not all(tensor.equal(base[name]) for name, tensor in tensors.items())


def test_an_exported_adapter_equals_the_checkpoint_s_adapter(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    save(ActorWorker, one_layer_dir, tmp_path / "actor", lora_rank=4)
    tensors = exported(one_layer_dir, tmp_path / "actor", tmp_path / "out", 4, as_adapter=True)
    assert_equal(tensors, tensors_of(tmp_path / "actor" / "lora_adapter"))
    assert (tmp_path / "out" / "adapter_config.json").is_file()


def test_the_average_is_exported_instead_of_the_weights(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    average = save(ActorWorker, one_layer_dir, tmp_path / "actor", ema_decay=0.5)
    tensors = exported(one_layer_dir, tmp_path / "actor", tmp_path / "out", of_average=True)
    assert_equal(tensors, average)
    weights = tensors_of(tmp_path / "actor" / "huggingface")
    assert not all(tensor.equal(weights[name]) for name, tensor in tensors.items())


def test_an_export_rejects_what_the_checkpoint_does_not_have(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    actor, out = tmp_path / "actor", tmp_path / "out"
    save(ActorWorker, one_layer_dir, actor, contents=["model"])
    with pytest.raises(CheckpointError, match="has no adapter .lora_rank=0."):
        exported(one_layer_dir, actor, out, as_adapter=True)
    with pytest.raises(CheckpointError, match="holds no moving average.*Leave out --average"):
        exported(one_layer_dir, actor, out, of_average=True)
    with pytest.raises(CheckpointError, match="belongs to a different model.*with --model"):
        exported(one_layer_dir, actor, out, lora_rank=4)

    (shard,) = (actor / "shards").glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"is damaged: shards/{shard.name} has"):
        exported(one_layer_dir, actor, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["actor"]


def test_an_export_is_synced_to_the_disk(
    one_layer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(ActorWorker, one_layer_dir, tmp_path / "role")

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="the disk is broken"):
        exported(one_layer_dir, tmp_path / "role", tmp_path / "kept")
