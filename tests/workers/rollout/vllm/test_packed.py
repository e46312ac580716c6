"""Layers that compute with a packed copy: what differs from what was sent is named."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from tests.workers.rollout_engines import (
    full_logits,
    make_engine,
    make_model,
    make_prompts,
    requests_of,
    settings,
)
from tests.workers.rollout_engines import load as load_weights
from tests.workers.stand_ins import Group, PlainTrainer, Receiver, Sender
from verl_like.errors import RolloutError, WeightSyncError
from workers.rollout.vllm.packed import PackedWeights, watch_packing
from workers.rollout.vllm.read_back import Held, WrittenPieces
from workers.weights.sync import sync_weights

SIZES = {"q": 4, "k": 2, "v": 2}


class Method:
    """Stands for vLLM's method of a layer; packs the weight, and drops it if it is told to."""

    def __init__(self, drops: bool) -> None:
        self.drops = drops

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda x, weight, bias: linear(x, layer.packed)
        if self.drops:
            layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)


class Model(nn.Module):
    """A fused projection that is dropped when it is packed, a head that is tied to an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv: Any = nn.Linear(5, 8, bias=False)
        self.embedding: Any = nn.Embedding(6, 5)
        self.head: Any = nn.Linear(5, 6, bias=False)
        self.head.weight = self.embedding.weight
        layers: list[tuple[Any, bool]] = [
            (self.qkv, True),
            (self.embedding, False),
            (self.head, False),
        ]
        for layer, drops in layers:
            layer.quant_method = Method(drops)
            layer.quant_method.process_weights_after_loading(layer)


class Load:
    """One load into the model, as vLLM makes it: its head counts as a layer without weights."""

    def __init__(self) -> None:
        self.model, self.written = Model().requires_grad_(False), WrittenPieces()
        self.packed = PackedWeights(self.written)
        watch_packing(self.model, self.packed.packing)

    def run(self, flaw: Callable[[Any], None] = lambda weight: None) -> None:
        """`flaw` gets at the fused weight before it is packed."""
        torch.manual_seed(0)
        tensors = {name: torch.randn(rows, 5) for name, rows in SIZES.items()}
        tensors["embedding"] = torch.randn(6, 5)
        for name, tensor in tensors.items():
            self.written.expect(name, tensor)

        qkv = nn.Parameter(torch.empty(8, 5), requires_grad=False)
        with self.written:
            for part, name in zip(qkv.data.split(list(SIZES.values())), SIZES, strict=True):
                part.copy_(tensors[name])
            self.model.embedding.weight.data.copy_(tensors["embedding"])
            flaw(qkv.data.numpy())
            self.model.qkv.weight = qkv
            for layer in (self.model.qkv, self.model.embedding):
                layer.quant_method.process_weights_after_loading(layer)
            self.packed.pack_tied(self.model)

    def held(self) -> Held:
        return self.written.read_back(self.model) + self.packed.read_back(self.model)


@pytest.fixture
def loaded() -> Load:
    load = Load()
    load.run()
    return load


def test_all_that_was_sent_is_computed_with(loaded: Load) -> None:
    assert loaded.held() == Held({"embedding": 30, "q": 20, "k": 10, "v": 10})


@pytest.mark.parametrize(("row", "name"), [(0, "q"), (3, "q"), (5, "k"), (6, "v")])
def test_a_packed_row_that_changed_names_the_tensor_that_was_sent(
    loaded: Load, row: int, name: str
) -> None:
    loaded.model.qkv.packed[row, 2] += 0.01
    held = loaded.held()
    assert held.damaged == (name,)
    assert set(held.num_elements) == {"embedding", "q", "k", "v"} - {name}


def test_what_was_packed_wrong_is_named_though_it_is_computed_with() -> None:
    load = Load()

    def flip(weight: Any) -> None:
        weight.view("uint8")[5, 0] ^= 1  # the lowest bit, which no sum shows

    load.run(flip)
    assert load.held().damaged == ("k",)


def test_a_head_that_is_tied_gets_new_weights_too(loaded: Load) -> None:
    model = loaded.model
    assert model.head.packed.equal(model.embedding.weight)
    model.head.packed.copy_(torch.randn(6, 5))
    assert loaded.held().damaged == ("embedding",)


class ExpertsMethod:
    """Stands for that of experts: turns the columns of each around, and keeps the rows."""

    moe_kernel = None
    flaw = 0.0

    def process_weights_after_loading(self, layer: Any) -> None:
        packed = layer.weight.detach().flip(2).contiguous()
        packed[1, 0, 0] += self.flaw
        layer.weight = nn.Parameter(packed, requires_grad=False)


def loaded_layer(method: Any, name: str, *shape: int) -> Any:
    """A layer of such a weight, loaded as two tensors of three rows, before its method runs."""
    layer: Any = nn.Module()
    layer.weight = nn.Parameter(torch.empty(shape), requires_grad=False)
    layer.quant_method = method
    layer.written = WrittenPieces()
    layer.watched = PackedWeights(layer.written)
    watch_packing(layer, layer.watched.packing)
    with layer.written:
        for number, part in enumerate(layer.weight.data.view(2, 3, 4)):
            tensor = torch.randn(3, 4)
            layer.written.expect(f"{name}.{number}", tensor)
            part.copy_(tensor)
    return layer


@pytest.fixture
def experts() -> Any:
    """Two experts of three rows, that are loaded and not yet packed."""
    return loaded_layer(ExpertsMethod(), "experts", 2, 3, 4)


def test_experts_in_another_order_are_read_as_they_are_kept(experts: Any) -> None:
    experts.quant_method.process_weights_after_loading(experts)
    assert experts.written.read_back(experts) == Held({"experts.0": 12, "experts.1": 12})
    experts.weight.data.view(torch.int32)[1, 2, 3] ^= 1
    assert experts.written.read_back(experts) == Held({"experts.0": 12}, ("experts.1",))


def test_an_expert_that_came_out_of_its_packing_otherwise_counts_as_unread(experts: Any) -> None:
    experts.quant_method.flaw = 0.01
    experts.quant_method.process_weights_after_loading(experts)
    assert experts.written.read_back(experts) == Held({"experts.0": 12})


class RoundingMethod:
    """Stands for one that quantises: a weight becomes whole numbers and their scale."""

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.scale = layer.weight.detach().abs().max() / 127
        rounded = (layer.weight.detach() / layer.scale).round().to(torch.int8)
        layer.weight = nn.Parameter(rounded, requires_grad=False)


@pytest.fixture
def rounding() -> Any:
    """A layer of two tensors, loaded and not yet quantised."""
    return loaded_layer(RoundingMethod(), "part", 6, 4)


def test_what_a_layer_quantises_is_compared_just_before(rounding: Any) -> None:
    rounding.quant_method.process_weights_after_loading(rounding)
    assert rounding.weight.dtype == torch.int8
    held = rounding.written.read_back(rounding) + rounding.watched.read_back(rounding)
    assert held == Held({"part.0": 12, "part.1": 12})


def test_what_is_quantised_from_other_bits_is_named(rounding: Any) -> None:
    rounding.weight.data.numpy().view("uint8")[4, 1] ^= 1  # no rounding shows it
    rounding.quant_method.process_weights_after_loading(rounding)
    held = rounding.written.read_back(rounding) + rounding.watched.read_back(rounding)
    assert held == Held({"part.0": 12}, ("part.1",))


def test_a_layer_that_got_nothing_is_not_read() -> None:
    load = Load()
    assert load.held() == Held()


# vLLM itself ------------------------------------------------------------------------------------

FUSED = {
    "q_proj": ("qkv_proj", 0, 64),
    "k_proj": ("qkv_proj", 64, 96),
    "v_proj": ("qkv_proj", 96, 128),
    "gate_proj": ("gate_up_proj", 0, 96),
    "up_proj": ("gate_up_proj", 96, 192),
}
"""vLLM's layer and its rows, of a weight of the model in `rollout_engines`."""


Numbers = np.ndarray[Any, Any]
"""A weight's memory: what is changed in it is not taken for vLLM's doing."""


def one_element(rows: Numbers) -> None:
    rows.reshape(-1)[1] += 0.01 * rows.std()


def zeroed_row(rows: Numbers) -> None:
    rows[1] = 0


def swapped_rows(rows: Numbers) -> None:
    rows[[0, 1]] = rows[[1, 0]]


Change = Callable[[Numbers], None]


def damage(model: nn.Module, name: str, change: Change) -> None:
    """Change what a layer of vLLM computes with, packed as vLLM packs it."""
    path, _, last = name.removesuffix(".weight").rpartition(".")
    fused, first, end = FUSED.get(last, (last, 0, None))
    layer: Any = model.get_submodule(f"{path}.{fused}".removeprefix("."))
    if not hasattr(layer, "cpu_linear") or last == "embed_tokens":
        change(layer.weight.data.numpy())
        return

    num_inputs = 96 if last == "down_proj" else 64
    weight = layer.cpu_linear(torch.eye(num_inputs), layer.weight, None).t().contiguous()
    change(weight[first:end].numpy())
    other: Any = nn.Linear(1, 1, bias=False)
    other.weight = nn.Parameter(weight, requires_grad=False)
    utils = importlib.import_module("vllm.model_executor.layers.utils")
    utils.dispatch_cpu_unquantized_gemm(other, remove_weight=False)
    layer.cpu_linear = other.cpu_linear


class Faults:
    """What is done to vLLM's model after each of the next loads."""

    def __init__(self) -> None:
        self.next: list[Callable[[nn.Module], None]] = []

    def after(self, model: nn.Module) -> None:
        if self.next:
            self.next.pop(0)(model)


@pytest.fixture(scope="module")
def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, Faults]]:
    """The engine, the trainer's model, and the faults to come."""
    gc.collect()  # an older engine that goes later takes the process groups of this one along
    reload = importlib.import_module("vllm.model_executor.model_loader.reload")
    folder, faults = tmp_path_factory.mktemp("vllm"), Faults()
    model = make_model(folder)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    finalize = reload.finalize_layerwise_reload

    def finalize_and_damage(module: nn.Module, *args: object) -> None:
        finalize(module, *args)
        faults.after(module)

    with pytest.MonkeyPatch.context() as damaging:
        damaging.setattr(reload, "finalize_layerwise_reload", finalize_and_damage)
        yield make_engine("vllm", model, folder), model, faults


@pytest.mark.vllm
@pytest.mark.parametrize("change", [one_element, zeroed_row, swapped_rows])
def test_whichever_weight_vllm_holds_otherwise_is_named(
    vllm_engine: tuple[Any, Any, Faults], change: Change
) -> None:
    engine, model, faults = vllm_engine
    load_weights(engine, model, 0)
    assert engine.unread == []
    names, refusals = [name for name, _ in model.named_parameters()], []
    assert len(names) == 21
    for name in names:
        faults.next = [partial(damage, name=name, change=change)]
        with pytest.raises(WeightSyncError) as caught:
            load_weights(engine, model, 1)
        refusals.append(str(caught.value))
    words = "engine: 1 held otherwise than they were sent: "
    assert refusals == [f"{words}{name}." for name in names]
    load_weights(engine, model, 2)


@pytest.mark.vllm
def test_what_vllm_holds_otherwise_once_is_sent_once_more_and_twice_ends_the_sync_by_name(
    vllm_engine: tuple[Any, Any, Faults], caplog: pytest.LogCaptureFixture
) -> None:
    engine, model, faults = vllm_engine
    sender, receiver = Sender(), Receiver()
    sender.engine, receiver.engine = PlainTrainer(0), engine
    sender.engine.module = model
    actor, rollout = Group([sender]), Group([receiver])
    name = "model.layers.1.mlp.up_proj.weight"

    flaw = partial(damage, name=name, change=zeroed_row)
    faults.next = [flaw]
    sync_weights(actor, rollout, 3)
    assert engine.version == 3
    assert f"held otherwise than they were sent: {name}." in caplog.text
    assert caplog.text.count("They are sent once more.") == 1
    (output,) = engine.generate(requests_of([[11, 12]]), settings(do_sample=False))
    steps = full_logits(model, [11, 12], output.tokens).log_softmax(-1)
    torch.testing.assert_close(
        output.log_probs, steps.gather(1, output.tokens[:, None])[:, 0], atol=1e-3, rtol=0
    )

    faults.next = [flaw, flaw]
    with pytest.raises(WeightSyncError, match=f"version 4 .*held otherwise than .*: {name}"):
        sync_weights(actor, rollout, 4)
    assert faults.next == [], "it was sent twice"
    assert engine.version is None
    with pytest.raises(RolloutError, match="no verified weights"):
        engine.generate(requests_of([[11, 12]]), settings())


@pytest.mark.vllm
def test_a_head_that_is_tied_to_the_embedding_computes_with_the_new_weights(
    tmp_path: Path,
) -> None:
    from transformers import LlamaForCausalLM

    config = make_model(tmp_path).config
    config.tie_word_embeddings = True
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    engine = make_engine("vllm", model, tmp_path)
    for version in range(2):
        with torch.no_grad():
            model.model.embed_tokens.weight.normal_()
        load_weights(engine, model, version)
        prompts = make_prompts()[:2]
        outputs = engine.generate(requests_of(prompts), settings(do_sample=False))
        for prompt, output in zip(prompts, outputs, strict=True):
            steps = full_logits(model, prompt, output.tokens).log_softmax(-1)
            theirs = steps.gather(1, output.tokens[:, None])[:, 0]
            torch.testing.assert_close(output.log_probs, theirs, atol=1e-3, rtol=0)
