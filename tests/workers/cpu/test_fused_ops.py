from __future__ import annotations

import ctypes
import resource
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.distributed import run
from tests.workers.gradients import ACTOR_COLUMNS, gradients
from tests.workers.models.architectures import build_tiny, tiny_model_config
from tests.workers.samples import VOCAB, make_batch, started, tiny_config
from workers.cpu import fused_ops as fused_ops_module
from workers.cpu.allocator import keep_freed_memory
from workers.cpu.fused_ops import fused_ops
from workers.roles.actor import ActorWorker
from workers.training.microbatch import Budget

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
}


def model_of(config_name: str, folder: Path) -> Any:
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, config_name)(**SIZES)
    )
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(folder / "model")
    return model


@pytest.mark.parametrize("family", ["Qwen2Config", "Qwen3Config", "LlamaConfig", "GemmaConfig"])
@pytest.mark.parametrize("min_multiplications", [1, 2**40])
def test_an_update_in_few_passes_has_the_gradients_of_the_models_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, min_multiplications: int
) -> None:
    model_of(family, tmp_path)
    config = tiny_config(tmp_path, entropy_coeff=0.01, use_kl_loss=True)
    found = []
    for own in (True, False):
        if own:
            monkeypatch.setattr(fused_ops_module, "fused_ops", lambda module: nullcontext())
        else:
            monkeypatch.undo()
            monkeypatch.setattr(fused_ops_module, "MIN_MULTIPLICATIONS", min_multiplications)
        found.append(
            gradients(started(ActorWorker, config, 1), make_batch(8), ACTOR_COLUMNS, Budget(rows=3))
        )
    for name, gradient in found[0].items():
        assert (found[1][name] - gradient).norm() <= 2e-6 * gradient.norm(), name


def test_only_what_computes_the_same_is_replaced_and_only_within(tmp_path: Path) -> None:
    from transformers.models.gemma import modeling_gemma
    from transformers.models.qwen2 import modeling_qwen2

    for family, modeling, count in (
        ("Qwen2Config", modeling_qwen2, 15 + 5 + 2 + 2),  # linear layers, norms, MLPs, attentions
        ("GemmaConfig", modeling_gemma, 15 + 2),
    ):
        module, rotary = model_of(family, tmp_path), modeling.apply_rotary_pos_emb
        with fused_ops(module), fused_ops(module):  # a second time it finds the first
            assert sum("forward" in vars(child) for child in module.modules()) == count
            for layer in module.model.layers:
                names = layer.self_attn.forward.__func__.__globals__
                assert names["apply_rotary_pos_emb"] is not rotary
            assert modeling.apply_rotary_pos_emb is rotary  # the model's module is left as it is
        assert not any("forward" in vars(child) for child in module.modules())


PARTIAL_ROTARY = (
    "gpt_neox phi3+partial glm4_moe laguna mimo_v2_flash nemotron qwen3_5 qwen3_next zaya "
    "recurrent_gemma qwen4_exp_text"
).split()
GATED_NORMS = ["mamba2", "bamba", "granitemoehybrid"]


def logits_and_gradient(module: Any) -> tuple[torch.Tensor, torch.Tensor]:
    module.zero_grad()
    logits = module(input_ids=6 + torch.arange(40)[None] * 7 % 120).logits
    logits.square().mean().backward()
    gradients = [each.grad.flatten() for each in module.parameters() if each.grad is not None]
    return logits.detach(), torch.cat(gradients).clone()


@pytest.mark.parametrize("case", PARTIAL_ROTARY + GATED_NORMS)
def test_partial_rotations_and_gated_norms_are_left_to_the_model(case: str) -> None:
    module = build_tiny(tiny_model_config(case))
    expected = logits_and_gradient(module)
    with fused_ops(module):
        found = logits_and_gradient(module)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 3e-5 * other.norm()


def test_what_a_norm_returns_may_be_written_over() -> None:
    module = build_tiny(tiny_model_config("mixtral"))
    norm = module.model.norm
    with fused_ops(module):
        norm(torch.randn(1, 3, 32)).mul_(2).sum().backward()
    assert norm.weight.grad.abs().sum() > 0


class NormWithGate(torch.nn.Module):
    """Agrees with an RMS norm where no gate is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(8)), 0.1

    def forward(self, states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        states = states if gate is None else states * gate
        return self.weight * states * (states.square().mean(-1, keepdim=True) + 0.1).rsqrt()


def test_a_class_that_may_be_given_more_than_the_formula_is_not_replaced() -> None:
    norm = NormWithGate()
    with fused_ops(norm):
        assert "forward" not in vars(norm)


def test_an_engine_on_another_device_than_the_cpu_enters_nothing(tiny_dir: Path) -> None:
    engine = started(ActorWorker, tiny_config(tiny_dir), 1).engine
    for device, is_entered in (("cpu", True), ("meta", False)):
        engine.device = torch.device(device)
        with engine.running():
            found = any("forward" in vars(child) for child in engine.module.modules())
        assert found == is_entered


def test_other_types_than_float32_run_as_the_model_has_them(tmp_path: Path) -> None:
    module = model_of("Qwen2Config", tmp_path).bfloat16()
    ids = torch.arange(12).view(2, 6)
    plain = module(ids).logits
    with fused_ops(module):
        assert torch.equal(module(ids).logits, plain)


def page_faults_of_a_tensor(tiny_dir: Path) -> int:
    """Of one of 64 MiB, made for the twentieth time in a process that trains.

    By then the heap has found its layout.
    """
    started(ActorWorker, tiny_config(tiny_dir), 1)
    for _ in range(20):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(16 * 2**20)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return faults


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallopt"), reason="the allocator is not glibc's"
)
def test_a_training_process_keeps_the_memory_of_freed_tensors(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (faults,) = run(1, page_faults_of_a_tensor, tiny_dir)
    assert faults < 64 * 2**20 / resource.getpagesize() / 10
    monkeypatch.setenv("MALLOC_ARENA_MAX", "4")
    assert not keep_freed_memory()  # the user's choice stands
