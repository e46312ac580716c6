"""A vLLM engine on a GPU lends its memory to the trainer, part by part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.workers.rollout.vllm.fakes import engine_on
from verl_like.errors import RolloutError, WeightSyncError
from workers.rollout.base import SamplingParams
from workers.rollout.vllm.engine import VllmRolloutEngine
from workers.rollout.vllm.setup import process_environment
from workers.rollout.vllm.worker import WorkerExtension

WEIGHTS, CACHE = "wake ['weights']", "wake ['kv_cache']"


@pytest.fixture
def log() -> list[Any]:
    return []


@pytest.fixture
def engine(
    monkeypatch: pytest.MonkeyPatch, folder: Path, model: Any, log: list[Any]
) -> VllmRolloutEngine:
    """An engine with a stand-in for vLLM, whose calls are logged."""
    return engine_on(monkeypatch, folder, log)


def resident(model: Any, log: list[Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the trainer's weights, which are on the GPU while they are gathered."""
    log.append("shards there")
    yield from ((name, weight.detach()) for name, weight in model.named_parameters())
    log.append("shards gone")


def steps(log: list[Any]) -> list[Any]:
    calls = ("sleep", "wake", "shards", "save_loose", "restore_loose", "use_version", "empty")
    return [entry for entry in log if entry.startswith(calls)]


def test_the_cache_wakes_last_and_torch_frees_memory_before(
    engine: VllmRolloutEngine, model: Any, log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.load_weights(resident(model, log))
    engine.commit(1)
    assert not [entry for entry in log if entry.startswith("wake")], "it has not slept"

    engine.commit(1)  # without a sleep
    assert CACHE not in log

    log.clear()
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: log.append("empty torch's cache"))
    engine.sleep()
    engine.wake_up()
    engine.load_weights(resident(model, log))
    log.append("shards: all ranks vote")
    engine.commit(2)
    assert steps(log) == [
        "save_loose_tensors",
        "sleep 2",
        "empty torch's cache",
        WEIGHTS,
        "restore_loose_tensors",
        "shards there",
        "shards gone",
        "shards: all ranks vote",
        "empty torch's cache",
        CACHE,
        "use_version",
    ]


def test_an_engine_sleeps_again_after_a_failed_sync(
    engine: VllmRolloutEngine, model: Any, log: list[Any]
) -> None:
    engine.sleep()
    with pytest.raises(WeightSyncError, match="missing"):
        engine.load_weights([])
    assert CACHE not in log
    with pytest.raises(RolloutError, match="no verified weights"):
        engine.submit([], SamplingParams(max_tokens=1, stop_token_ids=(0,)))

    log.clear()
    engine.sleep()
    assert steps(log) == [CACHE, "save_loose_tensors", "sleep 2"], "vLLM sleeps as a whole or not"
    engine.load_weights(resident(model, log))
    engine.commit(1)
    assert log.count(CACHE) == 2


@pytest.mark.usefixtures("model")
def test_vllm_on_a_cpu_does_not_sleep(
    monkeypatch: pytest.MonkeyPatch, folder: Path, log: list[Any]
) -> None:
    engine = engine_on(monkeypatch, folder, log, "cpu")
    engine.sleep()
    engine.wake_up()
    engine.commit(1)
    assert not [entry for entry in log if "sleep" in entry or "wake" in entry]


class Rope(nn.Module):
    """A layer with a buffer that no checkpoint has."""

    cos: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("cos", torch.arange(4.0), persistent=False)
        with torch.inference_mode():
            self.slopes = torch.arange(5.0)
        self.kv_cache = torch.ones(6)


def test_buffers_and_loose_tensors_are_restored_after_a_sleep() -> None:
    worker = WorkerExtension()
    rope = Rope()
    worker.model_runner = SimpleNamespace(model=nn.Sequential(rope, rope))
    memory = {id(rope.cos), id(rope.slopes)}
    worker.save_loose_tensors()
    with torch.inference_mode():
        for lost in (rope.cos, rope.slopes, rope.kv_cache):
            lost.fill_(-1)
    worker.restore_loose_tensors()
    assert rope.cos.tolist() == [0, 1, 2, 3]
    assert rope.slopes.tolist() == [0, 1, 2, 3, 4]
    assert rope.kv_cache.tolist() == [-1] * 6, "the cache is not restored"
    assert memory == {id(rope.cos), id(rope.slopes)}
    assert not worker._loose


def test_closing_an_engine_shuts_vllm_down(engine: VllmRolloutEngine, log: list[Any]) -> None:
    engine.close()
    assert log[-1] == "shut down"


@pytest.mark.parametrize(
    ("device_type", "num_ranks", "expected"),
    [("cuda", 4, "0"), ("cuda", 1, None), ("cpu", 4, None)],
)
def test_ranks_with_one_visible_gpu_reduce_without_symmetric_memory(
    monkeypatch: pytest.MonkeyPatch, device_type: str, num_ranks: int, expected: str | None
) -> None:
    names = ("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER")
    monkeypatch.setattr(os, "environ", {})
    with process_environment(device_type, 4.0, num_ranks):
        assert [os.environ.get(name) for name in names] == [expected] * 2
    monkeypatch.setattr(os, "environ", {names[0]: "1"})
    with process_environment("cuda", 4.0, 4):
        assert os.environ[names[0]] == "1", "the user's"
