"""Memory that torch caches on a GPU is released before vLLM allocates some."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.rollout.vllm.fakes import LIMITS, FakeLLM
from tests.workers.rollout_engines import make_model
from workers.rollout.vllm.engine import VllmEngine
from workers.rollout.vllm.in_process import InProcessVllm
from workers.rollout.vllm.setup import VllmSettings


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: found.append("given back"))
    return found


def test_what_training_and_syncs_left_free_is_given_back_before_vllm_allocates(
    log: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    make_model(tmp_path)
    monkeypatch.setattr(InProcessVllm, "start", lambda self: FakeLLM(log))
    engine = VllmEngine(VllmSettings(str(tmp_path), device_type="cuda"), LIMITS)
    engine.sleep()
    log.clear()
    engine.wake_up()
    engine.commit(1)
    steps = ("given back", "wake")
    assert [entry for entry in log if entry.startswith(steps)] == [
        "given back",
        "wake ['weights']",
        "given back",
        "wake ['kv_cache']",
    ]
