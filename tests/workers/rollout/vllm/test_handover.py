"""Beside the actor its weights go to vLLM from the memory in which they are gathered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.rollout.vllm.fakes import engine_on
from tests.workers.rollout_engines import make_model
from workers.weights import checksum


def test_no_weight_is_copied_to_the_host_on_its_way_to_vllm(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch refuses to copy a tensor from `meta` to host memory."""
    fetched: list[int] = []

    def to_host(numbers: Tensor) -> Tensor:
        fetched.append(numbers.nbytes)
        return torch.zeros(numbers.shape, dtype=numbers.dtype)

    monkeypatch.setattr(checksum, "to_host", to_host)
    model = make_model(tmp_path).to("meta")
    engine = engine_on(monkeypatch, tmp_path, [])
    llm: Any = engine.vllm.llm
    sent = dict(model.named_parameters())
    for version in range(2):
        llm.given.clear()
        engine.load_weights((name, weight.detach()) for name, weight in sent.items())
        engine.commit(version)
        assert {name: tensor.shape for name, tensor in llm.given.items()} == {
            name: weight.shape for name, weight in sent.items()
        }
        assert all(tensor.is_meta for tensor in llm.given.values())
    assert max(fetched) <= 8 * len(sent), "hashes"
