"""QLoRA: 4-bit weights under adapters, by bitsandbytes; equal to peft on the same base."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.workers.models.vision import write_model
from tests.workers.samples import make_batch, started, tiny_config
from verl_like.errors import ConfigError
from workers.config import ModelConfig, OptimConfig
from workers.models.causal_lm import language_half
from workers.models.lora import adapted_layers
from workers.models.memory_shapes import model_shapes
from workers.models.quantize import NF4Weight, check_nf4
from workers.models.state import is_adapter
from workers.parallel.sharding import resolve_sharding
from workers.roles.actor import ActorWorker
from workers.roles.reference import ReferenceWorker
from workers.training.engine import TrainEngine
from workers.training.role_model_spec import RoleModelSpec

pytest.importorskip("bitsandbytes")

QLORA = {"lora_rank": 4, "quantization": "nf4"}


def qlora_config(folder: Path) -> Any:
    return tiny_config(folder, model=QLORA, ppo_mini_batch_size=4, optim=OptimConfig(lr=1e-2))


def qlora_engine(path: Path, folder: Path) -> TrainEngine:
    model = ModelConfig(path=str(path), use_remove_padding=False, **QLORA)
    spec = RoleModelSpec("model.path", model, trains=True, quantization="nf4")
    engine = TrainEngine(spec, optim_config=OptimConfig(lr=1e-2))
    engine.build(ActorWorker(tiny_config(folder)), 10)
    return engine


def peft_model(path: Path) -> Any:
    """Return the model of transformers, bitsandbytes and peft."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four_bits = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    base = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=four_bits, dtype=torch.float32, device_map="cpu"
    )
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=16, target_modules="all-linear"))


def test_three_steps_equal_those_of_peft_on_the_same_base(one_layer_dir: Path) -> None:
    path = one_layer_dir / "model"
    engine, theirs = qlora_engine(path, one_layer_dir), peft_model(path)
    ours: Any = engine.module
    theirs.train()  # in eval mode, bitsandbytes may round inputs to bfloat16 on CPUs
    layers = [layer for layer in theirs.modules() if type(layer).__name__ == "Linear4bit"]
    assert layers
    named = {
        name.removeprefix("base_model.model."): weight for name, weight in theirs.named_parameters()
    }
    for name, weight in ours.named_parameters():
        if is_adapter(name):
            named[name].data.copy_(weight)

    trained = [weight for weight in theirs.parameters() if weight.requires_grad]
    assert len(trained) == len(engine.parameters())
    optimizers = [torch.optim.AdamW(weights, lr=1e-2) for weights in (engine.parameters(), trained)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        ids = torch.randint(6, 20, (3, 17), generator=generator)
        losses = []
        for module, optimizer in zip((ours, theirs), optimizers, strict=True):
            with engine.running():
                logits = module(input_ids=ids, use_cache=False).logits[:, :-1]
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    for name, weight in ours.named_parameters():
        if is_adapter(name):
            error = (weight - named[name]).detach().norm() / named[name].detach().norm()
            assert float(error) <= 1e-6, name


def test_the_base_has_four_bits_per_weight_and_no_gradient(one_layer_dir: Path) -> None:
    actor = started(ActorWorker, qlora_config(one_layer_dir), 10)
    before = {
        name: weight.numbers.clone()
        for name, weight in actor.engine.module.named_parameters()
        if isinstance(weight, NF4Weight)
    }
    actor.update_actor(make_batch(4))
    actor.update_actor(make_batch(4, seed=1))
    assert len(before) == len(adapted_layers(actor.engine.module))
    for name, weight in actor.engine.module.named_parameters():
        assert isinstance(weight, NF4Weight) == name.endswith("base_layer.weight")
        assert weight.requires_grad == is_adapter(name)
        if isinstance(weight, NF4Weight):
            assert weight.numbers.untyped_storage().nbytes() == weight.numel() // 2
            assert weight.scales.untyped_storage().nbytes() == 4 * -(-weight.numel() // 64)
            assert weight.grad is None
            assert weight.numbers.equal(before[name])
    assert len(actor.engine.optimizer.state) == len(actor.engine.parameters())


def test_no_float_copy_of_the_base_is_allocated_while_loading(
    one_layer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    write = NF4Weight.write

    def write_and_measure(weight: NF4Weight, values: torch.Tensor) -> None:
        parts = weight.numbers, weight.scales
        sizes.append(sum(part.untyped_storage().nbytes() for part in parts))
        write(weight, values)

    monkeypatch.setattr(NF4Weight, "write", write_and_measure)
    engine = qlora_engine(one_layer_dir / "model", one_layer_dir)
    weights = [weight for weight in engine.module.parameters() if isinstance(weight, NF4Weight)]
    assert sizes == [weight.numel() // 2 + 4 * -(-weight.numel() // 64) for weight in weights]


def test_the_engine_sends_dequantized_base_plus_adapter(one_layer_dir: Path) -> None:
    actor = started(ActorWorker, qlora_config(one_layer_dir), 10)
    actor.update_actor(make_batch(4))
    sent = dict(actor.engine.named_full_tensors())
    for name, layer in adapted_layers(actor.engine.module).items():
        factor = layer.scaling["default"]
        delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * factor
        torch.testing.assert_close(
            sent[f"{name}.weight"], layer.base_layer.weight.floats() + delta, rtol=1e-6, atol=1e-7
        )
    assert not any(isinstance(tensor, NF4Weight) for tensor in sent.values())


def test_a_reference_in_its_own_process_has_the_base_of_the_actor(one_layer_dir: Path) -> None:
    config = qlora_config(one_layer_dir)
    actor = started(ActorWorker, config, 10)
    reference = started(ReferenceWorker, config)
    batch = make_batch(4)
    ours = reference.compute_ref_log_prob(batch).batch["ref_log_prob"]
    theirs = actor.compute_log_prob(batch).batch.batch["old_log_probs"]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # adapters start at zero


def test_only_the_language_half_is_quantized(tmp_path: Path, one_layer_dir: Path) -> None:
    module = qlora_engine(write_model("qwen2_vl", tmp_path / "model"), one_layer_dir).module
    weights = {id(weight) for weight in module.parameters() if isinstance(weight, NF4Weight)}
    assert weights
    assert weights <= {id(weight) for weight in language_half(module).parameters()}


def test_casts_and_products_match_the_dequantized_weight() -> None:
    torch.manual_seed(0)
    values, bias = torch.randn(24, 40), torch.randn(24)
    weight = NF4Weight.empty(24, 40, torch.float32, "cpu")
    weight.copy_(values)
    assert float((weight.floats() - values).norm() / values.norm()) < 0.12
    narrow = weight.to(torch.bfloat16)
    assert isinstance(narrow, NF4Weight)
    assert narrow.dtype == torch.bfloat16
    assert narrow.numbers.data_ptr() == weight.numbers.data_ptr()

    gradients = []
    for factor in (weight, weight.floats()):
        states = torch.ones(5, 40, requires_grad=True)
        product = nn.functional.linear(states, factor, bias)
        product.square().sum().backward()
        gradients.append((product.detach(), states.grad))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compile": "on"}, "quantization=nf4 with .*compile=on"),
    ],
)
def test_settings_without_4_bit_support_are_rejected(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_nf4(replace(ModelConfig(path="model", **QLORA), **settings))


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigError, match=r"pip install 'verl-like\[quantization\]'"):
        check_nf4(ModelConfig(path="model", **QLORA))


def test_sharding_axes_are_rejected_and_data_parallel_ranks_hold_the_whole_base() -> None:
    from workers.config.model import FSDPConfig, ParallelConfig

    def resolved(parallel: ParallelConfig, **fsdp: Any) -> str:
        config = FSDPConfig(**fsdp)
        return resolve_sharding("fsdp", config, parallel, quantization="nf4").strategy

    assert resolved(ParallelConfig()) == "ddp"
    for axis in ("tp", "pp"):
        with pytest.raises(ConfigError, match=f"{axis}=2 .*quantization=nf4"):
            resolved(ParallelConfig(**{axis: 2}))
    with pytest.raises(ConfigError, match="quantization=nf4 keeps the whole model"):
        resolved(ParallelConfig(), fsdp_size=2)
    with pytest.raises(ConfigError, match="param_offload=true would offload them"):
        resolved(ParallelConfig(), param_offload=True)


def test_the_memory_plan_counts_the_bytes_that_are_allocated(one_layer_dir: Path) -> None:
    engine = qlora_engine(one_layer_dir / "model", one_layer_dir)
    allocated = 0
    for weight in engine.module.parameters():
        parts = (weight.numbers, weight.scales) if isinstance(weight, NF4Weight) else (weight,)
        allocated += sum(part.untyped_storage().nbytes() for part in parts)
    shapes = model_shapes(engine.model_config, "token", torch.float32)
    assert shapes.weight_bytes(torch.float32, "nf4") == allocated
