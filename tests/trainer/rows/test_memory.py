"""Memory plan of recipes on rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.workers.models.test_memory_shapes import DEEPSEEK_7B
from trainer.config.compose import load_config
from trainer.memory import role_models
from trainer.preference.recipe import DPO, PreferenceConfig
from trainer.rows.trainer import (
    largest_pass,
    plan_text,
    preflight,
    resolve_config,
    role_memories,
)
from trainer.sft.recipe import SFT
from verl_like.errors import ConfigError
from workers.memory import RoleMemory
from workers.parallel.sharding import ParallelDims


def dpo(tiny_dir: Path, *more: str) -> PreferenceConfig:
    path = f"{tiny_dir}/model"
    settings = [f"model.path={path}", f"ref.model.path={path}", "data.train_files=rows.jsonl"]
    config: PreferenceConfig = load_config([*settings, "trainer.backend=local", *more], DPO)
    return config


def memories(config: PreferenceConfig) -> dict[str, RoleMemory]:
    return {role.role: role for role in role_memories(config, "cpu")}


def test_trained_models_have_gradients_and_moments(tiny_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_dir / "model")
    num_bytes = 4 * sum(weight.numel() for weight in model.parameters())
    whole = memories(dpo(tiny_dir))
    trained, reference = whole["preference"], whole["ref"]
    assert trained.weights == trained.gradients == trained.moments / 2 == num_bytes
    assert (reference.weights, reference.gradients, reference.moments) == (num_bytes, 0, 0)

    sharded = memories(dpo(tiny_dir, "placement=split", "trainer.n_gpus_per_node=4"))
    assert sharded["preference"].weights == num_bytes / 2
    assert sharded["preference"].pool != sharded["ref"].pool


@pytest.mark.parametrize(
    ("more", "tokens"),
    [
        ((), 16384),
        (("data.train_batch_size=4", "data.max_length=100"), 4 * 2 * 100),
        (("data.use_dynamic_bsz=false", "data.micro_batch_size_per_gpu=3"), 3 * 2 * 512),
    ],
)
def test_a_pass_has_at_most_the_rows_of_a_step(
    more: tuple[str, ...], tokens: int, tiny_dir: Path
) -> None:
    config = dpo(tiny_dir, *more)
    role_model = role_models(config)["preference"]
    assert largest_pass(config, role_model, dims=ParallelDims()).tokens == tokens


def test_roles_that_do_not_fit_on_a_gpu_are_rejected(tiny_dir: Path) -> None:
    config = dpo(tiny_dir, "trainer.simulate=1x0.001GiB")
    with pytest.raises(ConfigError, match=r"does not fit.*preference: .*data\.max_token_len"):
        preflight(config)


@pytest.mark.parametrize("recipe", [SFT, DPO])
def test_as_few_layers_are_recomputed_as_memory_demands(recipe: Any, tmp_path: Path) -> None:
    DEEPSEEK_7B.save_pretrained(tmp_path)

    def settled(gib: float, *more: str) -> Any:
        settings = [f"model.path={tmp_path}", "data.train_files=rows.jsonl", *more]
        settings += ["data.max_token_len_per_gpu=8192", "data.train_batch_size=64"]
        settings += [f"trainer.simulate=8x{gib}GiB", "trainer.n_gpus_per_node=8"]
        config = load_config(settings, recipe)
        resolved = resolve_config(config)
        assert plan_text(resolved) == plan_text(config)
        return resolved.model.enable_gradient_checkpointing

    counts = [settled(gib) for gib in (20, 40, 60, 80, 300)]
    numbers = [30 if count is True else count for count in counts]
    assert numbers == sorted(numbers, reverse=True)
    assert len({*numbers}) > 2
    assert counts[-1] == 0
    assert settled(300, "model.enable_gradient_checkpointing=7") == 7
