"""A role's checkpoint: the restored state, on which ranks, and its errors."""

from __future__ import annotations

import json
import re
import resource
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.distributed import run
from tests.workers.kept_ranks import run_kept
from tests.workers.samples import learned, make_batch, own_chunk, started, tiny_config, weights_of
from verl_like.errors import CheckpointError
from workers.config import OptimConfig, WorkersConfig
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.training.checkpoints.save_load import export_huggingface

ROWS = 4
EVERYTHING = ["model", "optimizer", "extra", "hf_model"]


def config_of(
    one_layer_dir: Path,
    lora_rank: int = 0,
    contents: Sequence[str] = ("model", "optimizer", "extra"),
) -> WorkersConfig:
    groups = {"optimizer": "AdamWMatrixDecay", "weight_decay": 0.5}
    optim = OptimConfig(**groups, lr=1e-2, lr_scheduler_type="cosine", lr_warmup_steps=1)
    actor = {"ppo_mini_batch_size": ROWS // 2, "optim": optim}
    config = tiny_config(one_layer_dir, model={"lora_rank": lora_rank}, **actor)
    config.critic.ppo_mini_batch_size = ROWS // 2
    for section in (config.actor_rollout_ref.actor, config.critic):
        section.checkpoint.save_contents = list(contents)
    return config


def actor_of(one_layer_dir: Path, **settings: Any) -> ActorWorker:
    return started(ActorWorker, config_of(one_layer_dir, **settings), 10)


def update(worker: Any, seed: int) -> dict[str, float]:
    """Return the metrics of one update, and the next random numbers."""
    batch = own_chunk(make_batch(ROWS, seed), worker.rank, worker.world_size)
    method = worker.update_actor if isinstance(worker, ActorWorker) else worker.update_critic
    return learned(method(batch)) | {"drawn": float(torch.rand(())), "numpy": np.random.rand()}


def save_and_continue(
    cls: type, one_layer_dir: Path, folder: Path, **settings: Any
) -> tuple[list[dict[str, float]], str]:
    """Do two updates and a checkpoint; return the results of two more updates."""
    worker = started(cls, config_of(one_layer_dir, **settings), 10)
    torch.manual_seed(worker.rank)
    for seed in range(2):
        update(worker, seed)
    worker.save_checkpoint(str(folder), 2)
    return [update(worker, seed) for seed in (2, 3)], worker.weights_checksum()


def load_and_continue(
    cls: type, one_layer_dir: Path, folder: Path, updates_before: int = 0, **settings: Any
) -> tuple[list[dict[str, float]], str]:
    """Do the same two updates with a new worker, which may have updates to forget."""
    worker = started(cls, config_of(one_layer_dir, **settings), 10)
    for seed in range(updates_before):
        update(worker, seed + 10)
    worker.load_checkpoint(str(folder))
    return [update(worker, seed) for seed in (2, 3)], worker.weights_checksum()


@pytest.mark.parametrize(("cls", "lora_rank"), [(ActorWorker, 0), (CriticWorker, 4)])
def test_a_worker_resumes_bit_for_bit(
    one_layer_dir: Path, tmp_path: Path, cls: type, lora_rank: int
) -> None:
    expected = save_and_continue(cls, one_layer_dir, tmp_path / "role", lora_rank=lora_rank)
    assert (
        load_and_continue(cls, one_layer_dir, tmp_path / "role", 1, lora_rank=lora_rank) == expected
    )
    assert not (tmp_path / "role.part").exists()


def test_a_checkpoint_before_the_first_update_restores_a_fresh_optimizer(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    actor = actor_of(one_layer_dir)
    actor.save_checkpoint(str(tmp_path / "actor"))
    torch.manual_seed(1)
    expected = [update(actor, seed) for seed in (2, 3)]
    other = actor_of(one_layer_dir)
    update(other, 0)
    other.load_checkpoint(str(tmp_path / "actor"))
    torch.manual_seed(1)
    assert [update(other, seed) for seed in (2, 3)] == expected


def test_two_ranks_resume_bit_for_bit(one_layer_dir: Path, tmp_path: Path) -> None:
    expected = run_kept(2, save_and_continue, ActorWorker, one_layer_dir, tmp_path / "actor")
    assert (
        run_kept(2, load_and_continue, ActorWorker, one_layer_dir, tmp_path / "actor") == expected
    )
    assert expected[0][0][0]["drawn"] != expected[1][0][0]["drawn"]


def test_a_huggingface_export_has_the_actor_s_weights_and_tokenizer(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    actor = actor_of(one_layer_dir, contents=EVERYTHING)
    update(actor, 0)
    actor.save_checkpoint(str(tmp_path / "actor"))
    folder = tmp_path / "actor" / "huggingface"
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, weight in actor.engine.named_full_tensors():
        assert dict(model.named_parameters())[name].equal(weight)
    text = [{"role": "user", "content": "say a"}]
    ours, theirs = (
        AutoTokenizer.from_pretrained(folder),
        AutoTokenizer.from_pretrained(one_layer_dir / "model"),
    )
    assert ours.apply_chat_template(text) == theirs.apply_chat_template(text)
    assert model.generation_config.eos_token_id == theirs.eos_token_id


def test_a_critic_is_exported_as_a_classifier_of_one_label(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoModel, AutoModelForSequenceClassification

    critic = started(CriticWorker, config_of(one_layer_dir, lora_rank=4, contents=EVERYTHING), 10)
    update(critic, 0)
    critic.save_checkpoint(str(tmp_path / "critic"))
    folder = tmp_path / "critic" / "huggingface"
    model, body = (
        AutoModelForSequenceClassification.from_pretrained(folder),
        AutoModel.from_pretrained(folder),
    )
    assert model.config.num_labels == 1
    full = dict(critic.engine.named_full_tensors())
    assert full.keys() == dict(model.named_parameters()).keys()
    assert all(full[name].equal(weight) for name, weight in model.named_parameters())
    assert all(full[f"model.{name}"].equal(weight) for name, weight in body.named_parameters())


def export_in_shards(one_layer_dir: Path, folder: Path) -> dict[str, torch.Tensor]:
    actor = actor_of(one_layer_dir, lora_rank=4)
    update(actor, 0)
    export_huggingface(actor.engine, folder, writes=actor.rank == 0, shard_bytes=100_000)
    return weights_of(actor)


def test_rank_0_exports_a_large_model_in_shards_with_its_adapter_merged(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    full = run_kept(2, export_in_shards, one_layer_dir, tmp_path)[0]
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 1
    assert not list(tmp_path.glob("draft-*"))
    weights = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert all(weights[name].equal(tensor) for name, tensor in full.items())


def test_an_adapter_is_saved_without_its_base(one_layer_dir: Path, tmp_path: Path) -> None:
    sizes = []
    for rank in (0, 4):
        folder = tmp_path / f"rank {rank}"
        actor_of(one_layer_dir, lora_rank=rank).save_checkpoint(str(folder))
        sizes.append(sum(path.stat().st_size for path in (folder / "shards").iterdir()))
    assert sizes[1] < sizes[0] / 3
    assert (tmp_path / "rank 4" / "lora_adapter" / "adapter_model.safetensors").is_file()


def saved(one_layer_dir: Path, folder: Path, **settings: Any) -> ActorWorker:
    actor = actor_of(one_layer_dir, **settings)
    actor.save_checkpoint(str(folder), 1)
    return actor


def rejection(worker: Any, folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        worker.load_checkpoint(str(folder))
    return str(error.value)


def test_a_damaged_or_missing_shard_is_named(one_layer_dir: Path, tmp_path: Path) -> None:
    actor = saved(one_layer_dir, tmp_path / "actor")
    shard = tmp_path / "actor" / "shards" / "0.safetensors"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    before = actor.weights_checksum()
    assert "is damaged: shards/0.safetensors has" in rejection(actor, tmp_path / "actor")
    shard.unlink()
    assert "shards/0.safetensors is missing" in rejection(actor, tmp_path / "actor")
    (tmp_path / "actor" / "manifest.json").write_text("{")
    assert "manifest.json is damaged" in rejection(actor, tmp_path / "actor")
    (tmp_path / "actor" / "manifest.json").unlink()
    assert "it has no manifest.json, so it was never completed" in rejection(
        actor, tmp_path / "actor"
    )
    shutil.rmtree(tmp_path / "actor")
    assert "there is no such folder" in rejection(actor, tmp_path / "actor")
    assert actor.weights_checksum() == before


def damage_on_two_ranks(one_layer_dir: Path, folder: Path) -> str:
    actor = saved(one_layer_dir, folder)
    if actor.rank == 0:
        (folder / "shards" / "1.safetensors").unlink()
    torch.distributed.barrier()
    return rejection(actor, folder)


def test_every_rank_reports_another_rank_s_missing_shard(
    one_layer_dir: Path, tmp_path: Path
) -> None:
    for message in run_kept(2, damage_on_two_ranks, one_layer_dir, tmp_path / "actor"):
        assert "shards/1.safetensors is missing" in message


def test_a_checkpoint_of_another_model_is_rejected_with_its_tensors(
    one_layer_dir: Path, make_tiny: ModuleType, tmp_path: Path
) -> None:
    make_tiny.make(tmp_path / "wide", num_train=1, num_val=1, hidden_size=32, num_layers=2)
    saved(tmp_path / "wide", tmp_path / "actor")
    message = rejection(actor_of(one_layer_dir), tmp_path / "actor")
    assert "belongs to a different model" in message
    assert "9 unknown here: model.layers.1.input_layernorm.weight, " in message
    assert re.search(
        r"weight \(\[\d+, 32\] in the checkpoint, \[\d+, 64\] in this run\)",
        message,
    )
    message = rejection(actor_of(one_layer_dir, lora_rank=4), tmp_path / "actor")
    assert (
        "missing in the checkpoint: model.layers.0.self_attn.q_proj.lora_A.default.weight"
        in message
    )


def test_a_checkpoint_without_weights_is_rejected(one_layer_dir: Path, tmp_path: Path) -> None:
    actor = saved(one_layer_dir, tmp_path / "actor", contents=["hf_model"])
    message = rejection(actor, tmp_path / "actor")
    assert "has no weights: checkpoint.save_contents lacked 'model'" in message


def fill_the_disk(one_layer_dir: Path, folder: Path) -> tuple[str, str]:
    """Save a checkpoint, then one after another update without disk space for rank 1."""
    actor = saved(one_layer_dir, folder)
    update(actor, 0)
    if actor.rank == actor.world_size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
    try:
        with pytest.raises(CheckpointError) as error:
            actor.save_checkpoint(str(folder), 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    update(actor, 1)
    actor.load_checkpoint(str(folder))
    return str(error.value), actor.weights_checksum()


def test_a_full_disk_leaves_the_earlier_checkpoint(one_layer_dir: Path, tmp_path: Path) -> None:
    initial = actor_of(one_layer_dir).weights_checksum()
    for message, checksum in run(2, fill_the_disk, one_layer_dir, tmp_path / "actor"):
        assert "was not written (an earlier one is untouched)" in message
        assert "rank 1: " in message
        assert checksum == initial
    assert json.loads((tmp_path / "actor" / "manifest.json").read_text())["step"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["actor"]
