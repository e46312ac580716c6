"""Linear layers in float8 next to bfloat16, on the CPU, where torch supports float8, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.workers.gradients import ACTOR_COLUMNS, gradients
from tests.workers.samples import make_batch, started, tiny_config
from verl_like.errors import ConfigError
from workers.models.support.proof import relative_error
from workers.parallel.dims import ParallelDims
from workers.roles.actor import ActorWorker
from workers.training.parts.float8 import Float8, check_float8, float8_linears

CPU, BFLOAT16 = torch.device("cpu"), torch.bfloat16


def layer_and_states(num_rows: int) -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    layer = nn.Linear(64, 32).to(BFLOAT16)
    return layer, torch.randn(num_rows, 64).to(BFLOAT16)


def test_outputs_and_gradients_match_bfloat16_up_to_rounding() -> None:
    layer, states = layer_and_states(40)
    grad, results = torch.randn(40, 32).to(BFLOAT16), []
    for layers in ([], [layer]):
        leaf = states.clone().requires_grad_()
        with float8_linears(layers):
            output = layer(leaf)
            inputs = [leaf, layer.weight, layer.bias]
            results.append([output.detach(), *torch.autograd.grad(output, inputs, grad)])
    for ours, theirs in zip(*results[::-1], strict=True):
        assert ours.dtype == BFLOAT16
        assert relative_error(ours, theirs) < 0.06
    assert relative_error(results[1][0], results[0][0]) > 0.005
    for ours, theirs in zip(results[1][2:], results[0][2:], strict=True):  # of weights
        assert torch.equal(ours, theirs)
    assert "forward" not in vars(layer)


def test_a_token_s_output_does_not_depend_on_its_neighbors() -> None:
    layer, states = layer_and_states(40)
    others = states.clone()
    others[1:] *= 1000
    with float8_linears([layer]), torch.no_grad():
        outputs = layer(states), layer(others), layer(states[:1])
    assert torch.equal(outputs[0][0], outputs[1][0])
    assert torch.equal(outputs[0][0], outputs[2][0])


def actor(tiny_dir: Path, **model: Any) -> ActorWorker:
    model = {"compute_dtype": "bfloat16", **model}
    return started(ActorWorker, tiny_config(tiny_dir, model=model, ppo_mini_batch_size=8), 10)


def test_the_key_makes_all_layers_except_the_head_float8(tiny_dir: Path) -> None:
    results = []
    for is_rounded in (False, True):
        policy = actor(tiny_dir, fp8_linear=is_rounded)
        log_probs = policy.compute_log_prob(make_batch(8))[0].batch["old_log_probs"]
        results.append((log_probs, gradients(policy, make_batch(8), ACTOR_COLUMNS)))
        part = policy.engine.part(Float8)
        layers = set() if part is None else {id(layer) for layer in part.layers}
        linears = [part for part in policy.engine.module.modules() if type(part) is nn.Linear]
        assert len(layers) == (len(linears) - 1 if is_rounded else 0)
        assert id(policy.engine.module.lm_head) not in layers
    (exact, exact_grads), (rounded, rounded_grads) = results
    assert 1e-4 < (rounded - exact).abs().max() < 0.2
    for name, grad in exact_grads.items():
        assert rounded_grads[name].dtype == torch.float32
        assert (rounded_grads[name] - grad).norm() < 0.3 * grad.norm(), name
    policy.update_actor(make_batch(8))


def test_a_device_or_type_without_float8_is_rejected(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="fp8_linear: its products are in bfloat16.*float32"):
        actor(tiny_dir, fp8_linear=True, compute_dtype="float32")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(ConfigError, match="capability 8.9 .* not a NVIDIA A100. Leave out"):
        check_float8(torch.device("cuda"), BFLOAT16, ParallelDims())
    with pytest.raises(ConfigError, match="parallel.tp=2 splits linear layers. Leave out"):
        check_float8(CPU, BFLOAT16, ParallelDims(tp=2))

    def absent(*_: Any, **__: Any) -> Any:
        raise RuntimeError("not compiled with support")

    monkeypatch.setattr(torch, "_scaled_mm", absent)
    with pytest.raises(ConfigError, match="does not multiply float8 on cpu .not compiled"):
        check_float8(CPU, BFLOAT16, ParallelDims())
