"""Experts over ranks, where a rank has no rows and gets no tokens, and models without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from tests.workers.kept_ranks import run_kept
from verl_like.errors import ConfigError
from verl_like.process.worker import Worker
from workers.parallel.experts import check_experts, spread_experts

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


def make_model(family: str) -> Any:
    """Create a model with random weights and router biases."""
    known = AutoConfig.for_model(family)
    sizes = {name: value for name, value in SIZES.items() if hasattr(known, name)}
    config = AutoConfig.for_model(family, **sizes)
    # only this implementation leaves experts without a token out of the graph
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, experts_implementation="eager"
    )
    torch.manual_seed(3)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, 1.0 if weight.ndim == 1 else 0.0, 0.2)
    return model.eval()


def tokens_of(rank: int) -> torch.Tensor:
    """Return a rank's tokens; no rows become one token, as in a dummy pass."""
    generator = torch.Generator().manual_seed(rank)
    shape = (1, 1) if rank else (3, 7)
    return torch.randint(0, SIZES["vocab_size"], shape, generator=generator)


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens).logits.log_softmax(dim=-1)
    return logits.gather(-1, tokens[..., None]).square().sum()


def compare(trained: str) -> tuple[float, dict[str, float]]:
    """Return the relative error of this rank's loss, and of the gradients of `trained`.

    Rank 1 has no rows, and all tokens choose the experts of rank 0.
    """
    Worker().open_process_group()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    model, reference = make_model("qwen3_moe"), make_model("qwen3_moe")
    for experts_model in (model, reference):
        for name, weight in experts_model.named_parameters():
            weight.requires_grad_(trained in name)
            if name.endswith("mlp.gate.weight"):  # all choose the experts 0 and 1
                weight.detach().zero_()
    spread_experts(model, mesh)

    loss = loss_of(model, tokens_of(mesh.get_local_rank()))
    loss.backward()
    losses = [loss_of(reference, tokens_of(rank)) for rank in range(2)]
    sum(losses).backward()

    wanted, errors = dict(reference.named_parameters()), {}
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        if isinstance(weight, DTensor):
            grad = weight.grad.full_tensor()
        else:
            grad = weight.grad if weight.grad is not None else torch.zeros_like(weight)
            dist.all_reduce(grad)
        whole = wanted[name].grad
        errors[name] = float((grad - whole).abs().max() / whole.abs().max().clamp(min=1e-9))
    expected = losses[mesh.get_local_rank()]
    return float((loss - expected).abs() / expected.abs()), errors


@pytest.mark.parametrize("trained", ["", ".experts."])
def test_a_rank_whose_experts_get_no_token_joins_the_collectives(trained: str) -> None:
    for loss_error, errors in run_kept(2, compare, trained):
        assert loss_error < 1e-6
        assert {name: error for name, error in errors.items() if error > 2e-6} == {}


@pytest.mark.parametrize(
    ("size", "family", "words"),
    [
        (
            3,
            "qwen3_moe",
            "does not divide the 4 experts of model.layers.0.mlp.experts; valid: 1, 2, 4",
        ),
        (2, "llama", "LlamaForCausalLM has no routed experts"),
        (2, "llama4_text", r"\(Llama4TextExperts\) is not supported"),
    ],
)
def test_models_without_spreadable_experts_are_rejected(size: int, family: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_experts(make_model(family), size)
