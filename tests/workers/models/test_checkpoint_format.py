"""Weights are converted to and from a checkpoint's names and shapes, a few at a time."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.workers.models.architectures import build_tiny, tiny_model_config
from tests.workers.samples import tiny_config
from verl_like.errors import ConfigError
from workers.models import load
from workers.models.checkpoint_format import checkpoint_format
from workers.models.load import load_model
from workers.models.state import named_state

FAMILIES = ("mixtral", "qwen2_moe", "deepseek_v3", "kimi_linear", "hrm_text", "gpt2")
"""Experts in one tensor, three tensors in one, one tensor in four, and nothing to convert."""


def saved(folder: Path, family: str) -> Any:
    """A tiny model, written by transformers into `folder`/model."""
    module = build_tiny(tiny_model_config(family))
    module.save_pretrained(folder / "model")
    return module


def weights_in(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_names_and_tensors_equal_those_of_save_pretrained(family: str, tmp_path: Path) -> None:
    module = saved(tmp_path, family)
    written = weights_in(tmp_path / "model")
    checkpoint = checkpoint_format(str(tmp_path / "model"))
    stored = dict(checkpoint.stored(reversed(list(named_state(module)))))
    assert stored.keys() == written.keys() == checkpoint.names
    assert all(stored[name].equal(written[name]) for name in written)
    assert (stored.keys() != dict(named_state(module)).keys()) == (family != "gpt2")


def test_each_weight_is_converted_before_the_next_is_requested(tmp_path: Path) -> None:
    """At most one fused weight is in memory, and reused memory is released in time."""
    module = saved(tmp_path, "mixtral")
    requested: list[str] = []

    def one_by_one() -> Any:
        memory = torch.empty(0)
        for name, weight in named_state(module):
            requested.append(name)
            memory.fill_(torch.nan)
            memory = weight.detach().clone()
            yield name, memory

    experts = "model.layers.0.mlp.experts.gate_up_proj"
    first = "model.layers.0.block_sparse_moe.experts.0.w1.weight"
    for name, tensor in checkpoint_format(str(tmp_path / "model")).stored(one_by_one()):
        assert tensor.isfinite().all()
        if name == first:
            assert requested[-1] == experts
            break


def test_weights_of_one_conversion_are_copied_until_all_are_there(
    tmp_path: Path,
) -> None:
    module = saved(tmp_path, "hrm_text")
    memory = torch.empty(max(weight.numel() for weight in module.parameters()))

    def in_one_memory() -> Any:
        for name, weight in named_state(module):
            yield name, memory[: weight.numel()].view(weight.shape).copy_(weight.detach())

    written = weights_in(tmp_path / "model")
    for name, tensor in checkpoint_format(str(tmp_path / "model")).stored(in_one_memory()):
        assert tensor.equal(written[name]), name


@pytest.mark.parametrize("family", ["mixtral", "kimi_linear"])
def test_a_folder_is_loaded_without_from_pretrained(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = saved(tmp_path, family)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    loaded = load_model(tiny_config(tmp_path).actor_rollout_ref.model, "token")
    expected, weights = dict(named_state(module)), dict(named_state(loaded))
    assert weights.keys() == expected.keys()
    assert all(weights[name].equal(expected[name]) for name in expected)


def test_loading_frees_each_group_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading takes the module's weights and one group, however many layers there are."""
    saved(tmp_path, "mixtral")
    read, join = load.local_rows, load._end_to_end
    tensors, num_alive = list[weakref.ref[Tensor]](), []

    def recorded(tensor: Tensor) -> Tensor:
        tensors.append(weakref.ref(tensor))
        return tensor

    def read_and_count(weight: Tensor, stored: Any) -> Tensor:
        num_alive.append(len([tensor for tensor in tensors if tensor() is not None]))
        return recorded(read(weight, stored))

    monkeypatch.setattr(load, "local_rows", read_and_count)
    monkeypatch.setattr(load, "_end_to_end", lambda *args: recorded(join(*args)))
    load_model(tiny_config(tmp_path).actor_rollout_ref.model, "token")
    assert len(tensors) > len(num_alive) > 1
    assert not any(num_alive)


@pytest.mark.parametrize(
    ("name", "tensor", "words"),
    [
        ("experts.1.w2.weight", torch.ones(3, 4), r"experts.1.w2.weight \(is \[3, 4\], config"),
        (
            "experts.9.w2.weight",
            torch.ones(2),
            r"1 entry that the model does not use: .*experts.9.w2",
        ),
    ],
)
def test_an_expert_that_does_not_fit_is_rejected_by_name(
    name: str, tensor: Tensor, words: str, tmp_path: Path
) -> None:
    saved(tmp_path, "mixtral")
    weights = weights_in(tmp_path / "model") | {f"model.layers.0.block_sparse_moe.{name}": tensor}
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=words):
        load_model(tiny_config(tmp_path).actor_rollout_ref.model, "token")


def test_a_folder_with_fused_experts_is_loaded(tmp_path: Path) -> None:
    module = saved(tmp_path, "mixtral")
    weights = {name: weight.detach().contiguous() for name, weight in named_state(module)}
    save_file(weights, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(tiny_config(tmp_path).actor_rollout_ref.model, "token")
    assert all(weights[name].equal(weight) for name, weight in named_state(loaded))
