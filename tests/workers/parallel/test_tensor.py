"""What a pass of tensor-parallel ranks leaves, and models that they reject."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.workers.kept_ranks import run_kept
from tests.workers.models.architectures import build_tiny, tiny_model_config
from verl_like.errors import ConfigError
from verl_like.process.worker import Worker
from workers.parallel import tensor
from workers.parallel.vocabulary import token_stats


def model_of(case: str, changes: dict[str, Any]) -> Any:
    """Create a model off its defaults."""
    config = tiny_model_config(case)
    for name, value in changes.items():
        setattr(config, name, value)
    return build_tiny(config)


class Mark:
    """An object that lives as long as its tensor."""


def number_of_states_left(case: str) -> int:
    """Count states between the layers of a split model that survive a pass."""
    Worker().open_process_group()
    model = model_of(case, {})
    cut = tensor.split_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"])
    marks = []

    def mark(*inputs_and_output: Any) -> None:
        inputs_and_output[-1].mark = Mark()
        marks.append(weakref.ref(inputs_and_output[-1].mark))

    for path, layer in model.named_modules():
        if path.endswith("norm"):
            layer.register_forward_hook(mark)
    ids = torch.ones(1, 10, dtype=torch.long)
    logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
    columns = token_stats(logits, ids.flatten(), cut.vocab, 1.0, True, False)
    sum(column.sum() for column in columns.values()).backward()
    del logits, columns
    gc.collect()
    assert len(marks) > 4
    return sum(mark() is not None for mark in marks)


def test_no_state_of_a_pass_survives_it() -> None:
    assert run_kept(2, number_of_states_left, "mixtral") == [0, 0]


def rejection(case: str, tp: int, **changes: Any) -> str:
    with torch.device("meta"), pytest.raises(ConfigError) as caught:
        tensor.check_split(model_of(case, changes), tp, "actor.parallel.tp")
    return str(caught.value)


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss"])
def test_a_family_without_a_plan_is_rejected_by_name(family: str) -> None:
    assert rejection(family, 2) == (
        f"actor.parallel.tp=2: transformers has no tensor parallel plan for {family}. Set "
        "actor.parallel.tp=1, and shard with fsdp."
    )


def test_heads_that_do_not_divide_are_rejected_with_valid_sizes() -> None:
    assert rejection("llama", 3) == (
        "actor.parallel.tp=3 does not divide attention heads (4), key-value heads (2) of "
        "llama; sizes that do: 1, 2."
    )
    assert "does not divide key-value heads (2) of llama" in rejection("llama", 4)


def test_a_rule_of_no_layer_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", {})
    model._tp_plan = {**model._tp_plan, "model.encoder.*.q_proj": "colwise"}
    with pytest.raises(
        ConfigError, match=r"rule for model\.encoder\.\*\.q_proj, which matches no layer"
    ):
        tensor.check_split(model, 2, "actor.parallel.tp")


def test_a_weight_without_a_rule_next_to_split_weights_is_rejected() -> None:
    model = model_of("llama", {})
    model.model.layers[1].mlp.scale = torch.nn.LayerNorm(64)
    with pytest.raises(ConfigError, match=r"no rule for model\.layers\.1\.mlp\.scale\.weight"):
        tensor.check_split(model, 2, "actor.parallel.tp")


def test_a_mixture_without_dense_layers_needs_no_rules_for_them() -> None:
    layers = tensor.layers_of(model_of("qwen3_moe", {}))
    assert not any("gate_proj" in path for path in layers)
    assert any(path.endswith("mlp.experts") for path in layers)
