"""When memory that torch keeps free on a card is given back: before vLLM takes some."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workers.rollout.vllm.engine import VllmEngine, VllmSettings


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append("given back"))
    return found


def test_what_training_and_syncs_left_free_is_given_back_before_vllm_allocates(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine: Any = object.__new__(VllmEngine)
    engine.settings, engine._lacks_cache = VllmSettings("", device_type="cuda"), False
    engine.llm = SimpleNamespace(wake_up=lambda tags: log.extend(tags))
    engine._requests, engine._running, engine.follows = {}, {}, False
    monkeypatch.setattr(engine, "_everywhere", lambda *_: None)
    engine._allocate()
    engine.commit(1)
    assert log == ["given back", "weights", "given back", "kv_cache"]
