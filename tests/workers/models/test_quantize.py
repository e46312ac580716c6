"""Linear weights as int8: values, memory, and errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import JambaConfig

from tests.workers.rollout_engines import make_model
from verl_like.errors import ConfigError
from workers.config import ModelConfig
from workers.cpu import onednn
from workers.models import quantize
from workers.models.causal_lm import quantizable
from workers.models.load import load_model
from workers.models.quantize import Int8Weight, check_device, is_quantized, quantize_linears

CPU = torch.device("cpu")


def int8(values: Tensor) -> Int8Weight:
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


def test_a_product_uses_the_rounded_numbers() -> None:
    torch.manual_seed(0)
    states, values = torch.randn(7, 33), torch.randn(11, 33)
    bias = torch.randn(11)
    product = linear(states, int8(values), bias)
    np.testing.assert_allclose(product - bias, twin(states, values), atol=2e-6)


def test_a_weight_is_off_by_at_most_half_a_step_of_its_row() -> None:
    torch.manual_seed(0)
    values = torch.randn(2500, 8) * torch.logspace(-3, 3, 2500)[:, None]  # three blocks of rows
    error = (int8(values).float() - values).abs()
    steps = values.abs().amax(dim=1, keepdim=True) / 127
    assert bool((error <= 0.501 * steps).all())
    assert float(error.max()) > 0


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_stay_visible(broken: float) -> None:
    values = torch.ones(3, 4)
    values[1, 2] = broken
    product = linear(torch.ones(2, 4), int8(values))
    assert bool(product[:, 1].isnan().all())
    assert bool(product[:, [0, 2]].isfinite().all())

    states = torch.ones(2, 4)
    states[0, 0] = broken
    product = linear(states, int8(torch.ones(3, 4)))
    assert bool(product[0].isnan().all())
    assert bool(product[1].isfinite().all())


def test_zeros_and_no_rows_are_multiplied() -> None:
    weight = int8(torch.zeros(3, 4))
    assert torch.equal(linear(torch.zeros(2, 4), weight), torch.zeros(2, 3))
    assert linear(torch.zeros(0, 4), weight).shape == (0, 3)


def test_bfloat16_states_have_bfloat16_products() -> None:
    weight = int8(torch.eye(4, dtype=torch.bfloat16))
    assert weight.dtype == torch.bfloat16
    product = linear(torch.ones(2, 3, 4, dtype=torch.bfloat16), weight)
    assert product.dtype == torch.bfloat16
    assert torch.equal(product, torch.ones(2, 3, 4, dtype=torch.bfloat16))


def test_other_operations_get_the_floats() -> None:
    values = torch.randn(5, 6)
    weight = int8(values)
    floats = weight.floats()
    assert torch.equal(weight.t() @ torch.ones(5), floats.t() @ torch.ones(5))
    assert torch.equal(weight.detach().reshape(-1)[::7], floats.reshape(-1)[::7])
    assert type(weight + 1) is Tensor


def test_only_copies_write_to_a_weight() -> None:
    weight = int8(torch.ones(2, 3))
    with pytest.raises(TypeError, match="mul_.*would write to a weight that is quantized"):
        weight.mul_(2)
    with pytest.raises(ValueError, match=r"shape \[3, 2\] do not fit .* shape \[2, 3\]"):
        weight.copy_(torch.ones(3, 2))
    assert torch.equal(weight.floats(), torch.ones(2, 3))


def test_gradients_through_a_weight_raise() -> None:
    with pytest.raises(TypeError, match="they have no gradient"):
        linear(torch.ones(2, 3, requires_grad=True), int8(torch.ones(2, 3)))


def test_embeddings_heads_and_norms_are_not_quantized(tmp_path: Path) -> None:
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


def test_tied_weights_and_routers_are_not_quantized() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.out = nn.Embedding(5, 4), nn.Linear(4, 5)
            self.out.weight = self.embed.weight
            self.gate, self.gate_proj = nn.Linear(4, 2), nn.Linear(4, 8)

    assert [name for name, _ in quantizable(Layer())] == ["gate_proj"]


def test_a_class_whose_logits_change_is_rejected_by_name() -> None:
    config = JambaConfig()
    config._attn_implementation = "sdpa"
    module = nn.Module()
    module.layer, module.config = nn.Linear(2, 2), config
    with pytest.raises(ConfigError, match="'jamba' cannot be rounded to int8 .in a test"):
        quantize_linears(module, CPU)
    assert type(module.layer.weight) is nn.Parameter


def test_kernels_of_floats_do_not_support_it() -> None:
    values = torch.ones(2, 3)
    assert onednn.supports(nn.Parameter(values)) == onednn.supports(values)
    assert not onednn.supports(int8(values))


def test_a_processor_that_multiplies_wrong_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    quantize._is_exact.cache_clear()
    saturated = torch.full((5, 40), 2**15 - 1, dtype=torch.int32)
    monkeypatch.setattr(torch, "_int_mm", lambda *_: saturated)
    with pytest.raises(ConfigError, match="not exact on this processor"):
        check_device("cpu")
    quantize._is_exact.cache_clear()


def test_a_weight_has_only_memory_for_int8_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model(tmp_path)
    sizes: list[int] = []
    write = Int8Weight.write

    def write_and_measure(weight: Int8Weight, values: Tensor) -> None:
        parts = weight.numbers, weight.scales
        sizes.append(sum(part.untyped_storage().nbytes() for part in parts))
        write(weight, values)

    monkeypatch.setattr(Int8Weight, "write", write_and_measure)
    module = load_model(ModelConfig(path=str(tmp_path)), "token", CPU, "int8")
    weights = [weight for weight in module.parameters() if isinstance(weight, Int8Weight)]
    sizes = sizes[-len(weights) :]  # the proof on a small model writes first
    assert sizes == [weight.numel() + 4 * len(weight) for weight in weights]
