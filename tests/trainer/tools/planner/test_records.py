"""Calls recorded on the meta device with few layers and rows, for any number of both."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import LlamaConfig, MixtralConfig

from tests.workers.samples import make_batch, started, tiny_config
from trainer.tools.planner.cost import Gpus, ModelCost, StepRows, device_of, pass_seconds
from trainer.tools.planner.recorder import H100
from trainer.tools.planner.records import Records, record_passes, record_tokens
from workers.config import ModelConfig
from workers.parallel.sharding import ParallelDims
from workers.roles.actor import ActorWorker
from workers.training.role_model_spec import RoleModelSpec

SIZES: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 8,
    "num_key_value_heads": 2, "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip


def spec(folder: Path, num_layers: int, trains: bool = True) -> RoleModelSpec:
    LlamaConfig(**SIZES, num_hidden_layers=num_layers).save_pretrained(folder)
    return RoleModelSpec("model.path", ModelConfig(path=str(folder)), trains=trains)


def passes(folder: Path, num_layers: int, num_ranks: int = 1) -> Records:
    return record_passes(spec(folder, num_layers), 128, 384, H100, num_ranks)


@pytest.mark.long
@pytest.mark.parametrize("call", ["forward", "update", "step"])
def test_many_layers_take_as_long_as_if_all_were_recorded(tmp_path: Path, call: str) -> None:
    many, few = passes(tmp_path / "12", 12), passes(tmp_path / "6", 6)
    joined = Records({call: {3: {8: many.at(call, 3, 8)}, 6: {8: few.at(call, 6, 8)}}})
    assert joined.at(call, 12, 8).device == pytest.approx(many.at(call, 12, 8).device, rel=0.01)


@pytest.mark.long
def test_fsdp_gathers_layers_twice_per_pass_and_reduces_every_gradient(tmp_path: Path) -> None:
    hook = sys.excepthook
    records = passes(tmp_path, 4, num_ranks=8)
    layer = 1024 * (2 * 1024 + 2 * 256 + 3 * 3072) + 2 * 1024
    rest = 2 * 1000 * 1024 + 1024
    update, forward = records.at("update", 4, 8), records.at("forward", 4, 8)
    assert forward.gathered == 2 * (4 * layer + rest)
    assert update.gathered == 2 * (2 * 4 * layer + rest)
    assert update.reduced == 4 * (4 * layer + rest)
    assert sys.excepthook is hook


def test_an_actor_of_this_process_goes_on_after_a_recording(tmp_path: Path, tiny_dir: Path) -> None:
    config = tiny_config(tiny_dir)
    worker = started(ActorWorker, config, 2)
    open_groups = {*dist.distributed_c10d._pg_names.values()}
    passes(tmp_path, 2, num_ranks=8)
    assert {*dist.distributed_c10d._pg_names.values()} == open_groups
    worker.update_actor(make_batch(4))
    started(ActorWorker, config, 2)  # forms meshes


def test_a_frozen_model_has_no_update(tmp_path: Path) -> None:
    frozen = record_passes(spec(tmp_path, 2, trains=False), 128, 384, H100, 1)
    assert frozen.works.keys() == {"forward"}


@pytest.mark.long
def test_products_of_chosen_experts_are_counted(tmp_path: Path) -> None:
    works = []
    for choices in (2, 4):
        sizes = SIZES | {"architectures": ["MixtralForCausalLM"]}
        config = MixtralConfig(**sizes, num_experts_per_tok=choices, num_hidden_layers=2)
        config.save_pretrained(tmp_path / str(choices))
        model = ModelConfig(path=str(tmp_path / str(choices)))
        works.append(record_passes(RoleModelSpec("", model, trains=True), 128, 384, H100, 1))
    more = works[1].at("forward", 2, 64).device - works[0].at("forward", 2, 64).device
    least = 2 * 64 * 512 * 2 * 2 * 3 * 1024 * 3072 / H100.products
    assert least < more < 2 * least


def test_a_token_of_the_native_engine_is_bound_by_the_host(tmp_path: Path) -> None:
    token = record_tokens(spec(tmp_path, 4).model, 64, H100).at("token", 24, 64)
    assert token.host > 2 * token.device > 0


def test_a_class_that_cannot_be_recorded_takes_the_time_of_its_products(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise NotImplementedError("no meta kernel")

    monkeypatch.setattr("trainer.tools.planner.records._record_calls", fails)
    rows, gpus = StepRows(64, 64, 128, [384]), Gpus(device_of("H100", {}), 1, 8)
    cost = ModelCost.of(spec(tmp_path, 4), rows, gpus)
    again = ModelCost.of(spec(tmp_path, 4), rows, gpus)
    assert again.passes == cost.passes
    forward = pass_seconds(cost, rows, ParallelDims(), 16384, gpus)
    assert forward > 2 * cost.active * 64 * 512 / H100.products
