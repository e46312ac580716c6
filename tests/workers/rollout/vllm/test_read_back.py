"""What a model holds of the tensors that were copied into it: fused, padded, moved, packed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.workers.rollout.vllm.damaging import Damaging, Fault
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
from workers.rollout.vllm.handover import Arrivals, Handover
from workers.rollout.vllm.read_back import Held, ReadBack
from workers.rollout.vllm.setup import ExpectedWeights
from workers.rollout.vllm.worker import watch_processing
from workers.weights.checksum import byte_view
from workers.weights.sync import sync_weights


class PackingMethod:
    """Stands for a layer's method that quantises."""


class PlainCheckpoint:
    """Holds what the module holds."""

    kept = ("cut", "whole", "packed")

    def stored(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        return tensors


class Model(nn.Module):
    """Layers as vLLM has them: one tensor of all projections, a vocabulary with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 9, dtype=torch.bfloat16)
        self.embedding = nn.Embedding(8, 4)
        self.packed = nn.Linear(4, 2, bias=False)
        self.packed.quant_method = PackingMethod()


@pytest.fixture
def model() -> Model:
    return Model().requires_grad_(False)


def sent() -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"q": (3, 4), "k": (3, 4), "v": (3, 4), "embedding": (5, 4), "packed": (2, 4)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def load(model: Model, written: ReadBack) -> dict[str, Tensor]:
    """Copies as vLLM's loaders make them; the fused layer is filled elsewhere first."""
    tensors = sent()
    for name, tensor in tensors.items():
        written.expect(name, tensor)
    elsewhere = torch.empty_like(model.qkv.weight.data)
    with written:
        for number, name in enumerate("qkv"):
            elsewhere.narrow(0, 3 * number, 3).copy_(tensors[name])
        model.qkv.weight.data.copy_(elsewhere)
        model.embedding.weight.data[:5].copy_(tensors["embedding"])
        model.embedding.weight.data[5:].fill_(0)
        model.packed.weight.data.copy_(tensors["packed"])
    return tensors


def test_all_that_was_sent_is_found_where_the_loaders_put_it(model: Model) -> None:
    written = ReadBack()
    counts = {name: tensor.numel() for name, tensor in load(model, written).items()}
    assert written.held(model) == Held(counts)


@pytest.mark.parametrize(("row", "name"), [(0, "q"), (4, "k"), (8, "v")])
def test_a_bit_that_changed_within_a_fused_tensor_names_the_tensor_that_was_sent(
    model: Model, row: int, name: str
) -> None:
    written = ReadBack()
    load(model, written)
    byte_view(model.qkv.weight.data[row])[1] ^= 1
    held = written.held(model)
    assert held.damaged == (name,)
    assert name not in held.num_elements


def test_what_a_kernel_packs_is_not_counted_and_not_called_damaged(model: Model) -> None:
    written = ReadBack()
    load(model, written)
    model.packed.weight.data.neg_()
    with written:
        # computed from what arrived, by vLLM itself
        model.embedding.weight.data[:2].copy_(-model.embedding.weight.data[:2].exp())
    model.qkv.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    assert written.held(model) == Held()


def test_ranks_add_up_and_what_no_rank_holds_whole_is_named() -> None:
    names = ("cut", "whole", "packed")
    tensors = {name: torch.ones(4, 2) for name in names}
    expected = ExpectedWeights(
        {name: torch.Size((4, 2)) for name in names}, {}, 0, cast(Any, PlainCheckpoint())
    )
    handover = Handover(expected)
    assert list(handover.pieces(tensors.items())) == list(tensors.items())
    ranks = [Held({"cut": 4, "whole": 8}), Held({"cut": 4, "whole": 8, "packed": 6})]
    arrivals = [Arrivals(held=held) for held in ranks]
    assert handover.unread(arrivals) == ["packed"]
    assert handover.damaged(arrivals) == []
    arrivals.append(Arrivals(held=Held(damaged=("whole",))))
    assert handover.damaged(arrivals) == ["whole"]


class RoundingMethod:
    """Stands for one that quantises, or packs for a kernel."""

    def process_weights_after_loading(self, layer: Any) -> None:
        rounded = layer.weight.detach().round().to(torch.int8)
        layer.weight = nn.Parameter(rounded, requires_grad=False)


@pytest.mark.parametrize(("flipped", "damaged"), [(None, ()), (4, ("part.1",))])
def test_what_a_layer_makes_something_else_of_is_compared_just_before(
    flipped: int | None, damaged: tuple[str, ...]
) -> None:
    layer: Any = nn.Module()
    layer.weight = nn.Parameter(torch.empty(6, 4), requires_grad=False)
    layer.quant_method = RoundingMethod()
    written = ReadBack()

    def process(own: Callable[[nn.Module], None], layer: nn.Module) -> None:
        with written.processing(layer):
            own(layer)

    watch_processing(layer, process)
    with written:
        for number, part in enumerate(layer.weight.data.view(2, 3, 4)):
            tensor = torch.randn(3, 4)
            written.expect(f"part.{number}", tensor)
            part.copy_(tensor)
    if flipped is not None:
        layer.weight.data.numpy().view("uint8")[flipped, 1] ^= 1
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.weight.dtype == torch.int8
    whole = {f"part.{number}": 12 for number in range(2)}
    held = {name: count for name, count in whole.items() if name not in damaged}
    assert written.held(layer) == Held(held, damaged)


# vLLM itself ------------------------------------------------------------------------------------

FUSED = {
    "q_proj": ("qkv_proj", 0, 64),
    "k_proj": ("qkv_proj", 64, 96),
    "v_proj": ("qkv_proj", 96, 128),
    "gate_proj": ("gate_up_proj", 0, 96),
    "up_proj": ("gate_up_proj", 96, 192),
}
"""vLLM's layer and its rows, of a weight of the model in `rollout_engines`."""


def flip_a_bit(engine: Any, name: str) -> Fault:
    """In the memory of this weight of the trainer's model."""
    (model,) = engine.vllm.llm.collective_rpc(lambda worker: worker.model_runner.model)
    path, _, last = name.removesuffix(".weight").rpartition(".")
    fused, first, _ = FUSED.get(last, (last, 0, 0))
    damaged = model.get_submodule(f"{path}.{fused}".removeprefix("."))

    def flip(layer: Any) -> bool:
        if layer is damaged:
            rows = layer.weight.data if layer.weight.dim() == 2 else layer.weight.data[None]
            byte_view(rows[first]).numpy()[5] ^= 1
        return layer is damaged

    return flip


@pytest.fixture(scope="module")
def vllm_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any, Damaging]]:
    """The engine, the trainer's model, and the faults to come."""
    gc.collect()  # an older engine that goes later takes the process groups of this one along
    folder = tmp_path_factory.mktemp("vllm")
    model = make_model(folder)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_()
    with Damaging() as damaging:
        yield make_engine("vllm", model, folder), model, damaging


@pytest.mark.vllm
def test_whichever_weight_vllm_holds_otherwise_is_named(
    vllm_engine: tuple[Any, Any, Damaging], caplog: pytest.LogCaptureFixture
) -> None:
    engine, model, damaging = vllm_engine
    load_weights(engine, model, 0)
    assert engine.unread == []
    assert "are packed" not in caplog.text
    names, refusals = [name for name, _ in model.named_parameters()], []
    assert len(names) == 21
    for name in names:
        damaging.next = [flip_a_bit(engine, name)]
        with pytest.raises(WeightSyncError) as caught:
            load_weights(engine, model, 1)
        assert engine.version is None
        refusals.append(str(caught.value))
    words = "engine: 1 held otherwise than they were sent: "
    assert refusals == [f"{words}{name}." for name in names]
    load_weights(engine, model, 2)


@pytest.mark.vllm
def test_what_vllm_holds_otherwise_once_is_sent_once_more_and_twice_ends_the_sync_by_name(
    vllm_engine: tuple[Any, Any, Damaging], caplog: pytest.LogCaptureFixture
) -> None:
    engine, model, damaging = vllm_engine
    sender, receiver = Sender(), Receiver()
    sender.engine, receiver.engine = PlainTrainer(0), engine
    sender.engine.module = model
    actor, rollout = Group([sender]), Group([receiver])
    name = "model.layers.1.mlp.up_proj.weight"

    damaging.next = [flip_a_bit(engine, name)]
    sync_weights(actor, rollout, 3)
    assert engine.version == 3
    assert f"held otherwise than they were sent: {name}." in caplog.text
    assert caplog.text.count("They are sent once more.") == 1
    (output,) = engine.generate(requests_of([[11, 12]]), settings(do_sample=False))
    steps = full_logits(model, [11, 12], output.tokens).log_softmax(-1)
    torch.testing.assert_close(
        output.log_probs, steps.gather(1, output.tokens[:, None])[:, 0], atol=1e-3, rtol=0
    )

    damaging.next = [flip_a_bit(engine, name)] * 2
    with pytest.raises(WeightSyncError, match=f"version 4 .*held otherwise than .*: {name}"):
        sync_weights(actor, rollout, 4)
    assert damaging.next == [], "it was sent twice"
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
