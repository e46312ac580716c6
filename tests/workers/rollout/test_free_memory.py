"""When memory that torch keeps free on a card is given back: before vLLM takes some."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from workers.parallel import offload
from workers.parallel.offload import HostBlocks, give_back_after_calls, resident
from workers.parallel.sharding import Sharding
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
    engine._requests, engine._running = {}, {}
    monkeypatch.setattr(engine, "_everywhere", lambda *_: None)
    engine._allocate()
    engine.commit(1)
    assert log == ["given back", "weights", "given back", "kv_cache"]


def test_calls_give_back_what_they_left_where_vllm_of_another_process_takes_it(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "_gives_back", False)
    for expected in ([], ["given back"]):
        stays = Sharding("fsdp", 1, param_offload=False, optimizer_offload=False)
        with resident(nn.Linear(2, 2), None, stays, torch.device("cuda"), HostBlocks()):
            pass
        assert log == expected
        give_back_after_calls()
