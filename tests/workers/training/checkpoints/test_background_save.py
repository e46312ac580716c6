"""A checkpoint that is written while its role continues: its contents, and its errors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.workers.distributed import run
from tests.workers.samples import make_batch, own_chunk, started, tiny_config
from verl_like.errors import CheckpointError
from verl_like.files import fingerprint
from workers.models.tensor_files import WRITE_NOW
from workers.roles.actor import ActorWorker
from workers.training.checkpoints import background_copies
from workers.training.checkpoints.background_copies import FileCopies
from workers.training.checkpoints.manifest import add_files


class BackgroundActor(ActorWorker):
    """Writes even the tiny model in the background."""

    background_from_bytes = 0


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def save_both_ways(one_layer_dir: Path, folder: Path) -> list[bool]:
    """Write a step at once, and in the background during two updates."""
    config = tiny_config(one_layer_dir, model={"lora_rank": 4}, ppo_mini_batch_size=4)
    config.actor_rollout_ref.actor.checkpoint.save_contents.append("hf_model")
    actor = started(BackgroundActor, config, 10)
    batches = [own_chunk(make_batch(4, seed), actor.rank, actor.world_size) for seed in range(3)]
    actor.update_actor(batches[0])
    actor.save_checkpoint(str(folder / "at once"), 1)
    before = actor.weights_checksum()
    is_pending = actor.start_checkpoint(str(folder / "later"), 1)
    for batch in batches[1:]:
        actor.update_actor(batch)

    assert not list((folder / "later").rglob("*.safetensors"))
    dist.barrier()
    of_ranks: list[Any] = [None] * actor.world_size
    dist.all_gather_object(of_ranks, actor.write_checkpoint())
    if actor.rank == 0:
        add_files(folder / "later", {n: facts for files in of_ranks for n, facts in files.items()})
    dist.barrier()
    moved = actor.weights_checksum() != before
    actor.load_checkpoint(str(folder / "later"))
    return [is_pending, moved, actor.weights_checksum() == before]


def test_a_later_write_has_the_bytes_of_the_saved_step(one_layer_dir: Path, tmp_path: Path) -> None:
    assert run(2, save_both_ways, one_layer_dir, tmp_path) == [[True] * 3] * 2
    later = contents(tmp_path / "later")
    assert later == contents(tmp_path / "at once")
    assert len([name for name in later if name.startswith("shards/")]) == 2
    assert {"huggingface/model.safetensors", "lora_adapter/adapter_model.safetensors"} <= set(later)


def copied(tmp_path: Path, tensors: list[torch.Tensor], copies: FileCopies) -> bytes:
    path = tmp_path / "file"
    copies.begin(tmp_path)
    copies.add(path, b"head", tensors)
    for tensor in tensors:
        tensor.zero_()
    assert copies.write() == {"file": fingerprint(path)}
    return path.read_bytes()


def test_a_copy_reuses_memory_and_truncates_a_longer_file(tmp_path: Path) -> None:
    copies, addresses = FileCopies(least_bytes=0), []
    for length in (40, 30, 40):
        tensors = [torch.arange(length), torch.tensor(1.5), torch.ones(3, 2).bfloat16().T]
        WRITE_NOW.add(tmp_path / "at once", b"head", tensors)
        expected = (tmp_path / "at once").read_bytes()
        assert copied(tmp_path, tensors, copies) == expected
        (copy,) = copies._files.values()
        addresses.append(copy.bytes.data_ptr())
    assert addresses[0] == addresses[1] == addresses[2]


def test_a_small_checkpoint_is_written_at_once(one_layer_dir: Path, tmp_path: Path) -> None:
    actor = started(ActorWorker, tiny_config(one_layer_dir), 10)
    assert not actor.start_checkpoint(str(tmp_path / "actor"), 1)
    assert (tmp_path / "actor" / "manifest.json").is_file()


def test_without_memory_for_copies_files_are_written_at_once_and_one_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background_copies, "free_memory_gib", lambda: 0.0625)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    copies = FileCopies(least_bytes=1)
    copies.begin(tmp_path)
    for name, num_bytes in (("fits", 2**24), ("large", 2**24 + 1), ("as large", 2**24 + 1)):
        copies.add(tmp_path / name, b"head", [torch.zeros(num_bytes - 4, dtype=torch.uint8)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["as large", "large"]
    assert list(copies.write()) == ["fits"]
    (warning,) = caplog.messages
    assert "0.02 GiB on each of 2 ranks; half of the 0.06 free GiB may be used" in warning


def test_a_failed_write_names_rank_and_file(one_layer_dir: Path, tmp_path: Path) -> None:
    actor = started(BackgroundActor, tiny_config(one_layer_dir), 10)
    assert actor.start_checkpoint(str(tmp_path / "actor"), 1)
    shutil.rmtree(tmp_path / "actor")
    with pytest.raises(
        CheckpointError, match="rank 0: .*/actor/shards/0.safetensors: FileNotFound"
    ):
        actor.write_checkpoint()


def test_an_abandoned_checkpoint_is_not_written(one_layer_dir: Path, tmp_path: Path) -> None:
    actor = started(BackgroundActor, tiny_config(one_layer_dir), 10)
    assert actor.start_checkpoint(str(tmp_path / "actor"), 1)
    actor.hurry_checkpoint(is_wanted=False)
    with pytest.raises(CheckpointError, match="shards/0.safetensors was abandoned"):
        actor.write_checkpoint()
    assert not (tmp_path / "actor" / "shards" / "0.safetensors").exists()
    assert actor.start_checkpoint(str(tmp_path / "actor"), 2)
    assert list(actor.write_checkpoint()) == ["shards/0.safetensors"]
