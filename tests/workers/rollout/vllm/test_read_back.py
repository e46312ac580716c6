"""What a model holds of the tensors that were copied into it: fused, padded, moved, packed."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tests.workers.rollout.vllm.test_experts import hashes
from tests.workers.rollout_engines import load as load_weights
from tests.workers.rollout_engines import make_engine, make_model
from verl_like.errors import WeightSyncError
from workers.rollout.vllm.handover import Arrivals, Handover
from workers.rollout.vllm.read_back import Held, WrittenPieces
from workers.rollout.vllm.setup import ExpectedWeights
from workers.weights.checksum import byte_view


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


def load(model: Model, written: WrittenPieces) -> dict[str, Tensor]:
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
    written = WrittenPieces()
    counts = {name: tensor.numel() for name, tensor in load(model, written).items()}
    assert written.read_back(model) == Held(counts)


@pytest.mark.parametrize(("row", "name"), [(0, "q"), (4, "k"), (8, "v")])
def test_a_bit_that_changed_within_a_fused_tensor_names_the_tensor_that_was_sent(
    model: Model, row: int, name: str
) -> None:
    written = WrittenPieces()
    load(model, written)
    byte_view(model.qkv.weight.data[row])[1] ^= 1
    held = written.read_back(model)
    assert held.damaged == (name,)
    assert name not in held.num_elements


def test_what_a_kernel_packs_is_not_counted_and_not_called_damaged(model: Model) -> None:
    written = WrittenPieces()
    load(model, written)
    model.packed.weight.data.neg_()
    with written:
        # computed from what arrived, by vLLM itself
        model.embedding.weight.data[:2].copy_(-model.embedding.weight.data[:2].exp())
    model.qkv.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    assert written.read_back(model) == Held()


def test_ranks_add_up_and_what_no_rank_holds_whole_is_named() -> None:
    names = ("cut", "whole", "packed")
    tensors = {name: torch.ones(4, 2) for name in names}
    expected = ExpectedWeights(
        {name: torch.Size((4, 2)) for name in names}, {}, 0, cast(Any, PlainCheckpoint())
    )
    handover = Handover(expected)
    pieces = dict(handover.pieces(tensors.items()))
    ranks = [Held({"cut": 4, "whole": 8}), Held({"cut": 4, "whole": 8, "packed": 6})]
    arrivals = [Arrivals(hashes(pieces), held=held) for held in ranks]
    assert handover.unread(arrivals) == ["packed"]
    assert handover.damaged(arrivals) == []
    arrivals.append(Arrivals({}, held=Held(damaged=("whole",))))
    assert handover.damaged(arrivals) == ["whole"]


@pytest.mark.vllm
def test_weights_that_vllm_holds_otherwise_than_sent_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reload = importlib.import_module("vllm.model_executor.model_loader.reload")
    model = make_model(tmp_path)
    engine: Any = make_engine("vllm", model, tmp_path)
    load_weights(engine, model, 0)
    assert engine.unread == []
    assert "are packed" not in caplog.text

    finalize = reload.finalize_layerwise_reload

    def finalize_and_flip(module: nn.Module, *args: object) -> None:
        finalize(module, *args)
        norm = dict(module.named_parameters())["model.norm.weight"]
        byte_view(norm.data).numpy()[5] ^= 1  # as broken memory would, not as vLLM writes

    with monkeypatch.context() as damaging:
        damaging.setattr(reload, "finalize_layerwise_reload", finalize_and_flip)
        with pytest.raises(WeightSyncError, match="1 held otherwise than they .*: model.norm.wei"):
            load_weights(engine, model, 1)
    assert engine.version is None
    load_weights(engine, model, 2)
