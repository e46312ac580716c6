"""The native engine's direct pass against the module's, on every family, and its fallback."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.rollout_engines import trainer_log_probs
from verl_like.process.threads import computing_with
from workers.rollout.base import EngineLimits, SamplingParams
from workers.rollout.native import direct_forward
from workers.rollout.native import engine as native_rollout
from workers.rollout.native.direct_forward import DirectForward, agrees, is_llama_shaped
from workers.rollout.native.engine import NativeRolloutEngine
from workers.rollout.native.module_forward import ModuleForward
from workers.rollout.sample import Sample

VOCAB, PROMPT, RESPONSE = 70, 40, 12
BIASES = {"attention_bias": True, "mlp_bias": True}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 1}
"""Heads of 64 numbers: kernels of processors with 512-bit vectors look at the sizes."""

FAMILIES = [
    ("Llama", BIASES),
    ("Mistral", {}),
    ("Qwen2", {}),
    ("Qwen3", {"head_dim": 32}),
]


def make_model(family: str, **changes: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.1,
        **changes,
    }
    config = getattr(transformers, f"{family}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [
        random.integers(0, VOCAB, size=n).tolist() for n in (1, PROMPT, 3, 17, 16, 15, 30, 2, 9, 33)
    ]


def generate(
    model: Any,
    prompts: list[list[int]],
    rows: Sequence[int],
    max_num_seqs: int = 256,
    **changes: Any,
) -> dict[int, Sample]:
    """Return row -> output."""
    engine = NativeRolloutEngine(
        model, EngineLimits(PROMPT, RESPONSE, max_num_seqs), owns_weights=False
    )
    engine.commit(0)
    sampling = SamplingParams(**{"max_tokens": RESPONSE, "stop_token_ids": (3, 5), **changes})
    outputs = engine.generate([Sample(prompts[row], 1000 + row) for row in rows], sampling)
    return dict(zip(rows, outputs, strict=True))


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Return the kinds of pass of all decode steps."""
    kinds: list[type] = []
    monkeypatch.setattr(native_rollout, "check_decoding", lambda *_: None)  # it also decodes

    def record(kind: Any) -> None:
        decode = kind.decode

        def recorded(self: Any, *arguments: Any) -> Any:
            kinds.append(kind)
            return decode(self, *arguments)

        monkeypatch.setattr(kind, "decode", recorded)

    record(DirectForward)
    record(ModuleForward)
    return kinds


def hooked(model: Any) -> Any:
    """Return the same model with a no-op hook, which the direct pass does not know."""
    model = copy.deepcopy(model)
    model.lm_head.register_forward_hook(lambda *_: None)
    return model


@pytest.fixture(params=[True, False], ids=["oneDNN", "torch"])
def both_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with oneDNN's linear layers, if torch has them, and with torch's own."""
    monkeypatch.setattr(direct_forward, "NARROW", 0 if request.param else 2**30)


@pytest.mark.usefixtures("both_kernels")
@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_both_passes_have_the_same_tokens_and_log_probs(
    family: str, changes: dict[str, Any], prompts: list[list[int]], passes: list[type]
) -> None:
    model = make_model(family, **changes)
    rows = range(len(prompts))
    direct = generate(model, prompts, rows)
    assert set(passes) == {DirectForward}
    passes.clear()
    general = generate(hooked(model), prompts, rows)
    assert set(passes) == {ModuleForward}
    for row in rows:
        assert direct[row].tokens.tolist() == general[row].tokens.tolist()
        torch.testing.assert_close(direct[row].log_probs, general[row].log_probs, atol=1e-5, rtol=0)
        assert not direct[row].log_probs.is_inference()


def test_log_probs_in_bfloat16_equal_a_full_pass_up_to_rounding(
    prompts: list[list[int]],
) -> None:
    model = make_model("Qwen2").bfloat16()
    assert agrees(model)
    for output in generate(model, prompts, range(len(prompts))).values():
        expected = trainer_log_probs(model, output)
        torch.testing.assert_close(output.log_probs, expected, atol=0.1, rtol=0)


@pytest.mark.usefixtures("both_kernels")
@pytest.mark.parametrize(
    ("change", "sizes", "dtype"),
    [
        (lambda model: model, {}, torch.bfloat16),
        (hooked, {"intermediate_size": 96}, torch.float32),
        (lambda model: model, WIDE, torch.float32),
    ],
)
def test_the_length_of_other_samples_changes_no_bit(
    prompts: list[list[int]], change: Callable[..., Any], sizes: dict[str, int], dtype: torch.dtype
) -> None:
    model = change(make_model("Qwen2", **sizes).to(dtype))
    whole = generate(model, prompts, range(len(prompts)))
    for rows, max_num_seqs in [((2,), 256), ((9, 8, 7, 6, 3), 3)]:
        for row, output in generate(model, prompts, rows, max_num_seqs).items():
            assert output.tokens.tolist() == whole[row].tokens.tolist()
            assert torch.equal(output.log_probs, whole[row].log_probs)


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("shape", [(576, 192), (1536, 576)])  # SmolLM2-135M's
@pytest.mark.parametrize(("by_onednn", "least"), [(True, 4), (False, 16)])
def test_rows_of_linear_layers_have_the_same_bits_with_any_number_of_threads(
    by_onednn: bool, least: int, shape: tuple[int, int], threads: int
) -> None:
    torch.manual_seed(0)
    layer = direct_forward.build_linear(torch.nn.Linear(*shape), by_onednn)
    states, other = torch.randn(272, shape[0]), torch.randn(272, shape[1])
    with torch.no_grad():
        expected = [layer(states), layer.silu(states), layer.added_to(other.clone(), states)]
        with computing_with(threads):
            for rows in sorted({native_rollout.rows_of_pass(n, least) for n in range(1, 272)}):
                some, to = states[:rows], other[:rows].clone()
                results = layer(some), layer.silu(some), layer.added_to(to, some)
                for result, whole in zip(results, expected, strict=True):
                    assert torch.equal(result, whole[:rows])


@pytest.mark.parametrize(("least", "fewest"), [(4, [4, 8]), (16, [])])
def test_passes_have_few_sizes_and_few_unused_rows(least: int, fewest: list[int]) -> None:
    sizes = {count: native_rollout.rows_of_pass(count, least) for count in range(1, 1025)}
    for count, size in sizes.items():
        assert max(least, count) <= size < max(2 * count, count + 16, least + 1)
    assert sorted(set(sizes.values())) == [*fewest, *range(16, 1025, 16)]


def test_updates_of_the_module_take_effect_at_once(
    prompts: list[list[int]],
) -> None:
    model = make_model("Llama")
    engine = NativeRolloutEngine(model, EngineLimits(PROMPT, RESPONSE), owns_weights=False)
    sampling = SamplingParams(max_tokens=4, stop_token_ids=(), do_sample=False)
    for version in range(2):
        engine.commit(version)
        (output,) = engine.generate([Sample(prompts[3])], sampling)
        theirs = model.generate(torch.tensor([prompts[3]]), max_new_tokens=4, do_sample=False)
        assert torch.equal(output.tokens, theirs[0, -4:])
        for parameter in model.parameters():
            parameter.data.copy_(torch.randn_like(parameter) * 0.2)
    model(torch.tensor([prompts[3]])).logits.sum().backward()


def test_other_and_altered_models_are_not_llama_shaped() -> None:
    qwen2 = make_model("Qwen2")
    assert is_llama_shaped(qwen2)
    assert not is_llama_shaped(hooked(qwen2))
    assert not is_llama_shaped(make_model("Llama", hidden_act="gelu"))
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert not is_llama_shaped(make_model("Llama", rope_parameters=scaled))
    patched = copy.deepcopy(qwen2)
    patched.model.norm.forward = lambda states: states
    assert not is_llama_shaped(patched)
    adapted = copy.deepcopy(qwen2)
    adapted_linear = type("Adapted", (torch.nn.Linear,), {})
    adapted.model.layers[1].mlp.up_proj = adapted_linear(48, 80, bias=False)
    assert not is_llama_shaped(adapted)


def test_a_module_that_computes_something_else_decodes_itself(
    prompts: list[list[int]], passes: list[type], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    model, forward = make_model("Qwen2"), Qwen2MLP.forward
    monkeypatch.setattr(Qwen2MLP, "forward", lambda self, states: 1.1 * forward(self, states))
    with pytest.warns(UserWarning, match="direct pass differs from Qwen2ForCausalLM"):
        generate(model, prompts, range(4))
    assert set(passes[1:]) == {ModuleForward}  # the first pass is the comparison
