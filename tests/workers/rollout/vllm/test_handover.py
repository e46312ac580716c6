"""Next to the actor, vLLM gets weights from the memory in which they are gathered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.rollout.vllm.fakes import engine_on
from tests.workers.rollout_engines import make_model
from workers.rollout.vllm.handover import Arrivals, by_layer
from workers.rollout.vllm.worker import WorkerExtension
from workers.weights import full_weights


def test_no_weight_is_copied_to_the_host_on_its_way_to_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch refuses to copy a tensor from `meta` to host memory."""
    fetched: list[int] = []

    def to_host(numbers: Tensor) -> Tensor:
        fetched.append(numbers.nbytes)
        return torch.zeros(numbers.shape, dtype=numbers.dtype)

    monkeypatch.setattr(full_weights, "to_host", to_host)
    model = make_model(tmp_path).to("meta")
    engine = engine_on(monkeypatch, tmp_path, [])
    llm: Any = engine.vllm.llm
    sent = dict(model.named_parameters())
    for version in range(2):
        llm.weights.clear()
        engine.load_weights((name, weight.detach()) for name, weight in sent.items())
        engine.commit(version)
        assert llm.weights.keys() == sent.keys()
        assert all(tensor.shape == sent[name].shape for name, tensor in llm.weights.items())
        assert all(tensor.is_meta for tensor in llm.weights.values())
    assert max(fetched) <= 8 * len(sent), "hashes"


def test_the_tensors_of_a_layer_are_passed_together_and_do_not_change() -> None:
    memory = torch.zeros(2)

    def received() -> Iterator[tuple[str, Tensor]]:
        for number, name in enumerate(["embed", "norm", "h.0.a", "h.0.b.c", "h.1.a", "head"]):
            yield name, memory.fill_(number)

    layers = [
        [(name, tensor[0].item()) for name, tensor in layer] for layer in by_layer(received())
    ]
    assert layers == [
        [("embed", 0)],
        [("norm", 1)],
        [("h.0.a", 2), ("h.0.b.c", 3)],
        [("h.1.a", 4)],
        [("head", 5)],
    ]


class ModelOfVllm:
    """Has some tensors, and records those that arrive together."""

    def __init__(self, *places: str) -> None:
        self.places, self.calls = set(places), list[list[str]]()

    def load_weights(self, tensors: Any) -> set[str]:
        names = [name for name, _ in tensors]
        self.calls.append(names)
        if unknown := set(names) - self.places:
            raise KeyError(unknown.pop())
        return set(names)


def worker_with(model: ModelOfVllm, monkeypatch: pytest.MonkeyPatch) -> WorkerExtension:
    monkeypatch.setattr(WorkerExtension, "_loading", lambda self: nullcontext())
    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(model=model)
    return worker


def unplaced(worker: WorkerExtension, *names: str) -> list[str]:
    """Load tensors of these names; return those without a place."""
    worker._arrivals = Arrivals()
    worker.load_tensors([(name, torch.ones(1)) for name in names])
    return list(worker._arrivals.unplaced)


def test_a_later_load_places_the_tensors_of_a_layer_in_one_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ModelOfVllm("h.0.a", "h.0.b")
    worker = worker_with(model, monkeypatch)
    for _ in range(2):
        assert unplaced(worker, "h.0.a", "h.0.b") == []
    assert model.calls == [["h.0.a"], ["h.0.b"], ["h.0.a", "h.0.b"]]


def test_a_tensor_without_a_place_is_named_in_every_load(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelOfVllm("h.0.a", "h.0.b")
    worker = worker_with(model, monkeypatch)
    assert unplaced(worker, "h.0.a", "h.0.b") == []
    assert unplaced(worker, "h.0.a", "h.0.x") == ["h.0.x"]
    model.places.remove("h.0.b")
    assert unplaced(worker, "h.0.a", "h.0.b") == ["h.0.b"]
