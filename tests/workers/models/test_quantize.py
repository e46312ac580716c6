"""Linear weights as int8: values, memory, and errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import GPT2Config, GPT2LMHeadModel, JambaConfig

from tests.workers.rollout_engines import make_model
from verl_like.errors import ConfigError
from workers.config import ModelConfig
from workers.cpu import onednn
from workers.models import quantize
from workers.models.load import load_model
from workers.models.quantize import (
    Int8Weight,
    check_device,
    is_quantized,
    quantizable,
    quantize_linears,
)

CPU = torch.device("cpu")


def held(values: Tensor) -> Int8Weight:
    """Return these weights as int8."""
    out_width, in_width = values.shape
    weight = Int8Weight.empty(out_width, in_width, values.dtype, CPU)
    weight.copy_(values)
    return weight


def twin(states: Tensor, weight: Tensor) -> np.ndarray:
    """Compute `int8_linear` in float64 and plain loops over rows."""
    columns = weight.double().numpy()
    scales = np.abs(columns).max(axis=1) / 127
    rounded = np.rint(columns / scales[:, None])
    rows = []
    for row in states.double().numpy():
        scale = np.abs(row).max() / 127
        rows.append((rounded @ np.rint(row / scale)) * scale * scales)
    return np.stack(rows)


def test_a_product_is_that_of_the_rounded_numbers() -> None:
    torch.manual_seed(0)
    states, values = torch.randn(7, 33), torch.randn(11, 33)
    bias = torch.randn(11)
    found = linear(states, held(values), bias)
    np.testing.assert_allclose(found - bias, twin(states, values), atol=2e-6)


def test_a_weight_is_off_by_half_a_step_of_its_row_at_most() -> None:
    torch.manual_seed(0)
    values = torch.randn(2500, 8) * torch.logspace(-3, 3, 2500)[:, None]  # three blocks of rows
    error = (held(values).float() - values).abs()
    steps = values.abs().amax(dim=1, keepdim=True) / 127
    assert bool((error <= 0.501 * steps).all())
    assert float(error.max()) > 0


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_is_not_hidden(broken: float) -> None:
    values = torch.ones(3, 4)
    values[1, 2] = broken
    found = linear(torch.ones(2, 4), held(values))
    assert bool(found[:, 1].isnan().all())
    assert bool(found[:, [0, 2]].isfinite().all())

    states = torch.ones(2, 4)
    states[0, 0] = broken
    found = linear(states, held(torch.ones(3, 4)))
    assert bool(found[0].isnan().all())
    assert bool(found[1].isfinite().all())


def test_zeros_and_no_rows_are_fine() -> None:
    weight = held(torch.zeros(3, 4))
    assert torch.equal(linear(torch.zeros(2, 4), weight), torch.zeros(2, 3))
    assert linear(torch.zeros(0, 4), weight).shape == (0, 3)


def test_bfloat16_in_is_bfloat16_out() -> None:
    weight = held(torch.eye(4, dtype=torch.bfloat16))
    assert weight.dtype == torch.bfloat16
    found = linear(torch.ones(2, 3, 4, dtype=torch.bfloat16), weight)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, torch.ones(2, 3, 4, dtype=torch.bfloat16))


def test_other_operations_get_the_floats() -> None:
    values = torch.randn(5, 6)
    weight = held(values)
    floats = weight.floats()
    assert torch.equal(weight.t() @ torch.ones(5), floats.t() @ torch.ones(5))
    assert torch.equal(weight.detach().reshape(-1)[::7], floats.reshape(-1)[::7])
    assert type(weight + 1) is Tensor


def test_nothing_but_a_copy_writes_to_it() -> None:
    weight = held(torch.ones(2, 3))
    with pytest.raises(TypeError, match="mul_.*would write to a weight that is quantized"):
        weight.mul_(2)
    with pytest.raises(ValueError, match=r"\[3, 2\] does not fit a weight of \[2, 3\]"):
        weight.copy_(torch.ones(3, 2))
    assert torch.equal(weight.floats(), torch.ones(2, 3))


def test_it_refuses_to_be_trained_through() -> None:
    with pytest.raises(TypeError, match="they have no gradient"):
        linear(torch.ones(2, 3, requires_grad=True), held(torch.ones(2, 3)))


def bytes_of(weight: Tensor) -> int:
    """Return the bytes of a weight's storages."""
    parts = (weight.numbers, weight.scales) if isinstance(weight, Int8Weight) else (weight,)
    return sum(part.untyped_storage().nbytes() for part in parts)


def test_embeddings_heads_and_norms_stay_as_they_are(tmp_path: Path) -> None:
    make_model(tmp_path)
    module = load_model(ModelConfig(path=str(tmp_path)), "token", CPU, "int8")
    floats = [n for n, weight in module.named_parameters() if not isinstance(weight, Int8Weight)]
    assert {name.rpartition("layers.")[2].lstrip("0123456789.") for name in floats} == {
        "model.embed_tokens.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "model.norm.weight",
        "lm_head.weight",
    }
    assert is_quantized(module)


def test_tied_weights_and_routers_stay_as_they_are() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(5, 4), nn.Linear(4, 5)
            self.out.weight = self.embed.weight
            self.gate, self.gate_proj = nn.Linear(4, 2), nn.Linear(4, 8)

    assert [name for name, _ in quantizable(Layer())] == ["gate_proj"]


def test_a_model_without_linear_layers_is_refused_by_name() -> None:
    with torch.device("meta"):
        module = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=9))
    with pytest.raises(ConfigError, match="'gpt2' has no linear layers"):
        quantize_linears(module, CPU)


def test_a_class_whose_logits_rounding_changes_is_refused_by_name() -> None:
    config = JambaConfig()
    config._attn_implementation = "sdpa"
    module = nn.Module()
    module.layer, module.config = nn.Linear(2, 2), config
    with pytest.raises(ConfigError, match="'jamba' cannot be rounded to int8 .*off by [3-9]"):
        quantize_linears(module, CPU)
    assert type(module.layer.weight) is nn.Parameter


def test_kernels_of_floats_leave_it_alone() -> None:
    values = torch.ones(2, 3)
    assert onednn.supports(nn.Parameter(values)) == onednn.supports(values)
    assert not onednn.supports(held(values))


def test_a_gpu_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="only on CPUs.*device is cuda.*rollout.quantization=fp8"):
        check_device("cuda")


def test_a_processor_that_multiplies_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    quantize._is_exact.cache_clear()
    saturated = (torch.full((5, 40), 2**15 - 1, dtype=torch.int32),)
    monkeypatch.setattr(torch, "_int_mm", lambda *_: saturated[0])
    with pytest.raises(ConfigError, match="not exact on this processor"):
        check_device("cpu")
    quantize._is_exact.cache_clear()


def test_a_weight_has_room_for_int8_alone_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path)
    rooms: list[int] = []
    write = quantize.write

    def watched(weight: Int8Weight, values: Tensor) -> None:
        rooms.append(bytes_of(weight))
        write(weight, values)

    monkeypatch.setattr(quantize, "write", watched)
    module = load_model(ModelConfig(path=str(tmp_path)), "token", CPU, "int8")
    inside = [weight for weight in module.parameters() if isinstance(weight, Int8Weight)]
    rooms = rooms[-len(inside) :]  # before them come those of the small model that tries it out
    assert rooms == [weight.numel() + 4 * len(weight) for weight in inside]
