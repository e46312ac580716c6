"""vLLM's fp8 weights after two syncs, and its log-probs with them, on a CPU next to float32."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.runs import lines
from tests.workers.rollout_engines import (
    LIMITS,
    load,
    make_model,
    make_prompts,
    requests_of,
    settings,
    trainer_log_probs,
)

pytestmark = pytest.mark.vllm
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Layer of vLLM -> layers of the model that it joins."""
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def scales_of(numbers: Tensor) -> Tensor:
    """Return the scale of each row: its largest number becomes float8's largest."""
    return numbers.abs().amax(dim=-1, keepdim=True) / LARGEST


def rounded(numbers: Tensor) -> Tensor:
    """Round to float8 with a scale per row."""
    scales = scales_of(numbers)
    return (numbers / scales).to(torch.float8_e4m3fn).float() * scales


def change(model: Any, version: int) -> None:
    """Give a model new weights, some of whose rows are larger than others."""
    torch.manual_seed(version)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.05)
                weight[::5] *= 3


def quantized_layers(engine: Any) -> dict[str, Any]:
    """Return the layers of vLLM's model whose weights are in float8."""
    worker = engine.vllm.llm.llm_engine.model_executor.driver_worker.worker
    layers = worker.model_runner.model.named_modules()
    return {
        name: layer
        for name, layer in layers
        if "Fp8" in type(getattr(layer, "quant_method", None)).__name__
    }


def test_each_sync_fills_the_fp8_layers_of_vllm(tmp_path: Path) -> None:
    from workers.rollout.vllm.engine import VllmRolloutEngine
    from workers.rollout.vllm.setup import VllmSettings

    model = make_model(tmp_path)
    options = {"quantization": "fp8_per_channel"}
    engine = VllmRolloutEngine(VllmSettings(str(tmp_path), "bfloat16", options=options), LIMITS)
    for version in range(2):
        change(model, version)
        load(engine, model, version)
        layers = quantized_layers(engine)
        assert len(layers) == 4 * model.config.num_hidden_layers
        for name, layer in layers.items():
            prefix, _, last = name.rpartition(".")
            parts = [f"{prefix}.{part}.weight" for part in JOINED.get(last, (last,))]
            exact = torch.cat([model.state_dict()[part] for part in parts]).bfloat16().float()
            scales = layer.weight_scale.reshape(-1, 1)
            torch.testing.assert_close(scales, scales_of(exact), rtol=1e-6, atol=0)
            error = (layer.weight.t().float() * scales - exact).abs()
            assert (error <= exact.abs() / 16 + scales / 1024).all(), name
            assert error.max() > 0, name

            states = torch.randn(5, exact.shape[1], dtype=torch.bfloat16)
            product = rounded(states.float()) @ (layer.weight.float() * scales.t())
            output = layer.quant_method.apply(layer, states).float()
            assert (output - product).norm() < 0.01 * product.norm(), name
            assert (output - states.float() @ exact.t()).norm() > 0.02 * product.norm(), name

        samples = engine.generate(requests_of(make_prompts(), 4), settings())
        gaps = [sample.log_probs - trainer_log_probs(model, sample) for sample in samples]
        assert torch.cat(gaps).square().mean().sqrt() < 0.2


def test_a_step_with_fp8_rollouts_is_corrected(make_tiny: ModuleType, tmp_path: Path) -> None:
    from trainer import load_config, run

    tiny = make_tiny.make(tmp_path / "tiny", hidden_size=128)
    config = load_config(
        [
            f"actor_rollout_ref.model.path={tiny}/model",
            f"data.train_files={tiny}/train.parquet",
            f"trainer.default_local_dir={tmp_path}/run",
            *("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.kv_cache_gib=1"),
            *("actor_rollout_ref.rollout.dtype=bfloat16", "placement=colocate"),
            *("actor_rollout_ref.rollout.quantization=fp8", "trainer.backend=local"),
            *("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4"),
            *("data.max_prompt_length=16", "data.max_response_length=8", "trainer.logger=[]"),
            "trainer.total_training_steps=2",
        ]
    )
    run(config)
    steps = lines(tmp_path / "run")
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["rollout_corr/rollout_is_max"] > 1
        assert 1e-4 < metrics["training/rollout_probs_diff_max"] < 1e-2
