"""Layers by torch.compile next to the same layers without, on the CPU.

All tests but one run the traced graphs without compiling them, because g++ takes minutes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.workers.gradients import ACTOR_COLUMNS, gradients
from tests.workers.samples import make_batch, started, tiny_config
from tests.workers.training.rank_layouts import saved
from verl_like import tensor_ops
from verl_like.errors import ConfigError
from workers.models import attention
from workers.parallel.sharding import ParallelDims
from workers.roles.actor import ActorWorker
from workers.training.microbatch import MicroBatchBudget
from workers.training.model_parts import check_axes
from workers.training.model_parts import compile as compile_part
from workers.training.model_parts.compile import Compile, blocking_axis


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trace graphs without generating programs."""
    if "slow" not in request.keywords:
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    tensor_ops._compiled.cache_clear()
    yield
    tensor_ops._compiled.cache_clear()
    torch._dynamo.reset()


def actor(tiny_dir: Path, wanted: str, **model: Any) -> ActorWorker:
    config = tiny_config(tiny_dir, model={"compile": wanted, **model}, ppo_mini_batch_size=8)
    return started(ActorWorker, config, 10)


@pytest.fixture(scope="module")
def eager(one_layer_dir: Path) -> dict[str, Any]:
    return numbers(actor(one_layer_dir, "off"))


def numbers(policy: ActorWorker) -> dict[str, Any]:
    log_probs = policy.compute_log_prob(make_batch(8))[0].batch["old_log_probs"]
    return {
        "log_probs": log_probs,
        **gradients(policy, make_batch(8), ACTOR_COLUMNS, MicroBatchBudget(rows=3)),
    }


@pytest.mark.long
def test_traced_layers_match_others_and_reuse_their_graphs(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "num_key_value_heads": 1, "intermediate_size": 40}
    folder = saved(tmp_path, "llama", **sizes)
    eager = actor(folder, "off")
    policy = actor(folder, "on", enable_gradient_checkpointing=True)
    assert policy.engine.is_compiled
    arguments = make_batch(8), ACTOR_COLUMNS, MicroBatchBudget(rows=3)
    expected = gradients(eager, *arguments)
    for name, gradient in gradients(policy, *arguments).items():
        assert (gradient - expected[name]).norm() <= 1e-4 * expected[name].norm(), name
    num_graphs = []
    for rows in (8, 5, 7):
        policy.engine.forward_rows(make_batch(rows), MicroBatchBudget(rows=rows))
        num_graphs.append(counters["stats"]["unique_graphs"])
    assert num_graphs[1] == num_graphs[2] > 0


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_match_others_up_to_rounding(
    one_layer_dir: Path, eager: dict[str, Any], checkpointing: bool
) -> None:
    policy = actor(one_layer_dir, "on", enable_gradient_checkpointing=checkpointing)
    assert policy.engine.is_compiled
    for name, number in numbers(policy).items():
        assert (number - eager[name]).norm() <= 1e-4 * eager[name].norm(), name
    policy.update_actor(make_batch(8))
    assert not any("forward" in vars(layer) for layer in policy.engine.module.modules())


def test_auto_compiles_only_on_gpus(tiny_dir: Path) -> None:
    assert not actor(tiny_dir, "auto").engine.is_compiled


def test_without_a_compiler_auto_warns_and_on_is_rejected(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: Any) -> Any:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr(compile_part, "_doubled", fails)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    with pytest.raises(ConfigError, match="compile=on: No working C.. compiler found. Set"):
        actor(tiny_dir, "on")
    policy = actor(tiny_dir, "auto")
    attention.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        part = Compile()
        part.change(policy.engine)
        part.finish(policy.engine)
    assert "are not compiled: No working C++ compiler found" in caplog.text
    assert not policy.engine.is_compiled
    policy.update_actor(make_batch(8))


def test_layers_that_fail_to_compile_are_not_used(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no graph of this layer")

    compiles = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda f: compiles(f) if f is compile_part._doubled else fails
    )
    with pytest.raises(
        ConfigError, match="compile=on: no graph of this layer. Set actor_rollout_ref.model.comp"
    ):
        actor(tiny_dir, "on")


def test_layers_with_collectives_inside_are_not_compiled(tiny_dir: Path) -> None:
    policy = actor(tiny_dir, "off").engine
    policy.model_config.compile = "on"
    section = "actor_rollout_ref.actor.parallel"
    with pytest.raises(ConfigError, match=r"parallel.tp=2 has collectives inside layers. Set"):
        check_axes(policy.module, policy.model_config, ParallelDims(tp=2), section)
    assert blocking_axis(ParallelDims(shard=4, sp=2)) == ""
    assert blocking_axis(ParallelDims(pp=2)).startswith("pp=2")
