"""A model over two to four tensor-parallel ranks gives the outputs and gradients of a whole one."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.workers.kept_ranks import run_kept
from tests.workers.models.architectures import VOCAB, build_tiny, tiny_model_config
from verl_like.errors import ConfigError
from verl_like.process.worker import Worker
from workers.config import ModelConfig
from workers.models.causal_lm import ScalarHeadModel
from workers.models.lora import add_adapter
from workers.parallel import tensor
from workers.parallel.fsdp import add_up_gradients, begin_pass, shard
from workers.parallel.vocabulary import VocabShard, token_stats

LARGEST_ERROR = 1e-6
"""Weights are float64, and norms compute in float32; what is left out is off by some per cent."""
ROWS, WIDTH = 6, 10
FEW = ["llama", "qwen3", "phi3", "qwen3_moe"]
OTHERS = ["qwen2", "gemma2", "gemma3_text", "gpt_neox", "mixtral", "deepseek_v2", "deepseek_v3"]


def model_of(case: str, changes: dict[str, Any]) -> Any:
    """Create a float64 model off its defaults, optionally with an adapter or a scalar head."""
    changes = dict(changes)
    rank, scalar = changes.pop("lora_rank", 0), changes.pop("scalar", False)
    config = tiny_model_config(case)
    for name, value in changes.items():
        setattr(config, name, value)
    model = build_tiny(config).double()
    model.config._experts_implementation = "eager"  # grouped products have no float64
    generator = torch.Generator().manual_seed(1)
    if scalar:
        model = ScalarHeadModel(model)
        torch.nn.init.normal_(model.score.weight, generator=generator)
    if rank:
        add_adapter(model, ModelConfig(path="", lora_rank=rank))
        model.double()
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(weight, std=0.1, generator=generator)
    return model


def numbers(model: Any, words: VocabShard | None, ids: Tensor) -> list[Tensor]:
    """Return a loss's inputs per token: values, or log-probs, entropies and sums of squares."""
    if isinstance(model, ScalarHeadModel):
        return [model(input_ids=ids, use_cache=False)[..., 0].flatten()]
    logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
    labels = ids.roll(-1, dims=1).flatten()
    if words is not None:
        return list(token_stats(logits, labels, words, 0.7, True, True).values())
    log_probs = (logits / 0.7).log_softmax(-1)
    probs = log_probs.exp()
    of_labels = log_probs.gather(-1, labels[:, None])[:, 0]
    return [of_labels, -(probs * log_probs).sum(-1), probs.square().sum(-1)]


def passes(model: Any, cut: Any, ids: Tensor, size: int, before: Any = lambda _: None) -> Tensor:
    """Run passes over `size` rows each; return the loss inputs, [columns, tokens]."""
    found = []
    chunks = ids.split(size)
    for number, rows in enumerate(chunks, 1):
        before(number == len(chunks))
        columns = numbers(model, None if cut is None else cut.vocab, rows)
        weights = (rows + torch.arange(WIDTH)).flatten().double().sin()
        sum((column * weights ** (k + 1)).sum() for k, column in enumerate(columns[:2])).backward()
        found.append(torch.stack([column.detach() for column in columns]))
    return torch.cat(found, dim=1)


def errors(
    case: str, tp: int, size: int, changes: dict[str, Any], shards: int = 1
) -> dict[str, float]:
    """Return the relative errors of a split model: its numbers and every gradient."""
    Worker().open_process_group()
    mesh = init_device_mesh("cpu", (shards, tp), mesh_dim_names=("shard", "tp"))
    tokens = torch.Generator().manual_seed(0)
    ids = torch.randint(
        6, model_of(case, changes).config.vocab_size, (ROWS, WIDTH), generator=tokens
    )
    whole, own = model_of(case, changes), model_of(case, changes)
    expected = passes(whole, None, ids, ROWS)
    add_up_gradients(list(whole.parameters()), None)

    tensor.check(own, tp, "parallel.tp")
    cut = tensor.apply(own, mesh["tp"])
    mine = ids.chunk(shards)[mesh.get_local_rank("shard")]
    if shards > 1:
        one_unit = shard(own, mesh["shard"], None)
        found = passes(own, cut, mine, size, lambda last: begin_pass(own, one_unit, last))
        expected = expected.chunk(shards, dim=1)[mesh.get_local_rank("shard")]
    else:
        found = passes(own, cut, mine, size)
    cut.add_up_gradients()

    result = {"numbers": float((found - expected).norm() / expected.norm())}
    gradients = dict(own.named_parameters())
    for name, weight in whole.named_parameters():
        if weight.requires_grad and weight.grad.norm() > 0:
            grad = gradients[name].grad.full_tensor()
            result[name] = float((grad - weight.grad).norm() / weight.grad.norm())
    return result


def assert_equal(case: str, tp: int, size: int, shards: int = 1, **changes: Any) -> None:
    for found in run_kept(tp * shards, errors, case, tp, size, changes, shards):
        assert len(found) > 3
        assert max(found.values()) < LARGEST_ERROR, max(found, key=found.__getitem__)


@pytest.mark.parametrize("case", [*FEW, "deepseek_v3"])
def test_two_ranks_get_the_gradients_of_one_over_several_passes(case: str) -> None:
    changes = {"num_key_value_heads": 4} if case == "deepseek_v3" else {}
    assert_equal(case, tp=2, size=2, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, ROWS])
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("case", [*FEW, *OTHERS])
def test_ranks_get_the_gradients_of_one(case: str, tp: int, size: int) -> None:
    assert_equal(case, tp=tp, size=size, num_key_value_heads=4)


def test_tied_embeddings_are_one_weight_and_words_need_not_divide() -> None:
    assert_equal("qwen2", tp=2, size=3, tie_word_embeddings=True, vocab_size=VOCAB - 3)


@pytest.mark.parametrize("case", ["qwen3", "mixtral"])
def test_four_ranks_shard_and_cut(case: str) -> None:
    assert_equal(case, tp=2, size=1, shards=2)


@pytest.mark.parametrize("case", ["qwen3", "phi3"])
def test_adapters_are_cut_with_their_base(case: str) -> None:
    assert_equal(case, tp=2, size=2, lora_rank=3)


def test_values_come_from_whole_hidden_states() -> None:
    assert_equal("qwen3", tp=2, size=2, scalar=True)


class Mark:
    """An object that lives as long as its tensor."""


def number_of_states_left(case: str) -> int:
    """Count states between the layers of a split model that survive a pass."""
    Worker().open_process_group()
    model = model_of(case, {})
    cut = tensor.apply(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))["tp"])
    marks = []

    def mark(*inputs_and_output: Any) -> None:
        inputs_and_output[-1].mark = Mark()
        marks.append(weakref.ref(inputs_and_output[-1].mark))

    for path, layer in model.named_modules():
        if path.endswith("norm"):
            layer.register_forward_hook(mark)
    passes(model, cut, torch.ones(1, WIDTH, dtype=torch.long), 1)
    gc.collect()
    assert len(marks) > 4
    return sum(found() is not None for found in marks)


@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_nothing_is_left_of_a_pass(case: str) -> None:
    assert run_kept(2, number_of_states_left, case) == [0, 0]


def refusal(case: str, tp: int, **changes: Any) -> str:
    with torch.device("meta"), pytest.raises(ConfigError) as caught:
        tensor.check(model_of(case, changes), tp, "actor.parallel.tp")
    return str(caught.value)


@pytest.mark.parametrize("family", ["gpt2", "opt", "bloom", "falcon", "gpt_bigcode", "gpt_oss"])
def test_a_family_without_a_plan_is_refused_by_name(family: str) -> None:
    assert refusal(family, 2) == (
        f"actor.parallel.tp=2: transformers has no tensor parallel plan for {family}; set "
        "actor.parallel.tp=1, and shard with fsdp."
    )


def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_do() -> None:
    assert refusal("llama", 3) == (
        "actor.parallel.tp=3 does not divide attention heads (4), key-value heads (2) of "
        "llama; sizes that do: 1, 2."
    )
    assert "does not divide key-value heads (2) of llama" in refusal("llama", 4)


def test_a_rule_of_no_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", {})
    model._tp_plan = {**model._tp_plan, "model.encoder.*.q_proj": "colwise"}
    with pytest.raises(ConfigError, match=r"rule model\.encoder\.\*\.q_proj matches no layer"):
        tensor.check(model, 2, "actor.parallel.tp")


def test_a_weight_beside_cut_ones_without_a_rule_is_refused() -> None:
    model = model_of("llama", {})
    model.model.layers[1].mlp.scale = torch.nn.LayerNorm(64)
    with pytest.raises(ConfigError, match=r"no rule for model\.layers\.1\.mlp\.scale\.weight"):
        tensor.check(model, 2, "actor.parallel.tp")


def test_a_mixture_without_dense_layers_needs_no_rules_for_them() -> None:
    layers = tensor.layers_of(model_of("qwen3_moe", {}))
    assert not any("gate_proj" in path for path in layers)
    assert any(path.endswith("mlp.experts") for path in layers)
