"""A published checkpoint is trained as the class that its folder names, with a frozen tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.workers.models.architectures import build_tiny, tiny_model_config
from tests.workers.samples import make_batch, started, tiny_config
from workers.config import ModelConfig
from workers.models.causal_lm import empty_model, language_half
from workers.models.checkpoint_format import checkpoint_format
from workers.models.load import check_files, load_model
from workers.models.memory_shapes import model_shapes
from workers.models.state import named_state
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.rollout.vllm.setup import expected_weights
from workers.training.checkpoints.save_load import export_huggingface

PUBLISHED = ("gemma3", "qwen2_vl", "llava", "llama4")
"""A tower next to the language model, names that conversions change, and no base model."""


@pytest.fixture(scope="module", params=PUBLISHED)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model`, which `save_pretrained` of the published class wrote."""
    folder = tmp_path_factory.mktemp(request.param)
    build_tiny(tiny_model_config(request.param)).save_pretrained(folder / "model")
    return folder


def config_of(folder: Path, **model: Any) -> Any:
    config = tiny_config(folder, model=model, ppo_mini_batch_size=4)
    config.critic.ppo_mini_batch_size = 4
    return config


def trained_names(module: Any) -> set[str]:
    return {name for name, weight in module.named_parameters() if weight.requires_grad}


def test_the_weights_of_a_published_class_keep_their_names(published: Path) -> None:
    written = load_file(published / "model" / "model.safetensors")
    module = load_model(ModelConfig(path=str(published / "model")), "token")
    assert type(module).__name__ == module.config.architectures[0]
    stored = dict(checkpoint_format(str(published / "model")).stored(named_state(module)))
    assert stored.keys() == written.keys()
    assert all(stored[name].equal(written[name]) for name in written)


@pytest.mark.parametrize("has_level", [True, False])
@pytest.mark.parametrize(
    ("case", "tower"),
    [("gemma3", "vision_tower."), ("llava", "vision_tower."), ("deepseek_vl", "vision_model.")],
)
def test_towers_keep_the_level_that_published_checkpoints_have(
    case: str, tower: str, has_level: bool, tmp_path: Path
) -> None:
    """transformers 5 has removed the level, and `save_pretrained` of a new model leaves it out."""
    build_tiny(tiny_model_config(case)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    published = {
        name.replace(tower, f"{tower}vision_model.") if has_level else name: tensor
        for name, tensor in load_file(file).items()
    }
    save_file(published, file, metadata={"format": "pt"})
    config = ModelConfig(path=str(tmp_path))
    check_files(empty_model(config, "token", torch.device("cpu")), config, "token")
    module = load_model(config, "token")
    stored = dict(checkpoint_format(str(tmp_path)).stored(named_state(module)))
    assert stored.keys() == published.keys()
    assert all(stored[name].equal(tensor) for name, tensor in published.items())
    if has_level:
        expected = expected_weights(str(tmp_path), reads_images=True)
        assert expected.checkpoint.names == published.keys()


def test_only_the_language_half_is_trained_and_needs_memory(published: Path) -> None:
    actor = started(ActorWorker, config_of(published), 10)
    module = actor.engine.module
    before = {name: weight.clone() for name, weight in named_state(module)}
    actor.update_actor(make_batch(4))
    moved = {n for n, weight in named_state(module) if not weight.equal(before[n])}
    language = language_half(module).parameters()
    half = {id(weight) for weight in (*language, module.get_output_embeddings().weight)}
    expected = {name for name, weight in module.named_parameters() if id(weight) in half}
    assert trained_names(module) == expected
    assert moved <= expected
    assert expected != dict(module.named_parameters()).keys()

    shapes = model_shapes(ModelConfig(path=str(published / "model")), "token", torch.float32)
    assert shapes.num_trained == sum(w.numel() for w in module.parameters() if w.requires_grad)
    assert shapes.body is not None


def test_adapters_fit_only_the_language_half(published: Path) -> None:
    pytest.importorskip("peft")
    targets: Any
    for targets in ("all-linear", ["q_proj"]):
        config = config_of(published, lora_rank=2, target_modules=targets)
        module = started(ActorWorker, config, 10).engine.module
        names = trained_names(module)
        inside = {id(weight) for weight in language_half(module).parameters()}
        assert names
        assert all(id(module.get_parameter(name)) in inside for name in names)


def test_a_critic_of_a_published_class_is_trained_and_loaded_again(published: Path) -> None:
    config = config_of(published)
    critic = started(CriticWorker, config, 10)
    critic.update_critic(make_batch(4))
    folder = published / "critic"
    export_huggingface(critic.engine, folder, writes=True)
    again = load_model(ModelConfig(path=str(folder)), "scalar")
    expected = dict(named_state(critic.engine.module))
    for name, weight in named_state(again):
        assert weight.equal(expected[name]), name
