"""The roofline: what the device is predicted to do may not grow, and nothing waits in a pass."""

from __future__ import annotations

import json
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tests import ROOT
from tests.conftest import load
from workers.rollout.native.direct_forward import DirectForward
from workers.rollout.native.kv_cache import SlotCache, Slots

TOLERANCE = 1.02


@pytest.fixture(scope="module")
def roofline() -> ModuleType:
    return load("benchmarks/roofline.py")


@pytest.fixture(scope="module")
def recorded() -> Any:
    return json.loads((ROOT / "benchmarks/roofline.json").read_text("utf-8"))


@pytest.mark.parametrize("size", ["0.5b", "1.5b", "7b"])
def test_the_predicted_time_of_a_token_does_not_grow(
    roofline: ModuleType, recorded: Any, size: str
) -> None:
    assert roofline.update_us(size) <= TOLERANCE * recorded["update, us per token"][size]


def test_a_decoded_token_starts_no_more_operations(roofline: ModuleType, recorded: Any) -> None:
    token = roofline.decoded_token("0.5b", 256, 128, layers=2)
    assert token.num_started <= recorded["operations per token of two layers"]
    assert sum(token.waits.values()) <= 2


def test_decoding_is_fit_for_a_cuda_graph(roofline: ModuleType) -> None:
    """Equal operations over equal shapes and buffers, without a wait or a copy to the device."""
    meta, rows = torch.device("meta"), 8
    forward = DirectForward(roofline.policy("0.5b", 2), SlotCache(2, Slots(rows, 64, 64, meta)))
    ids, slots = torch.zeros(rows, dtype=torch.long, device=meta), torch.arange(rows, device=meta)
    passes = []
    with torch.inference_mode():
        forward.prefill([(6,) * 16] * rows, 16, slots, 0)
        forward.decode(ids, slots)
        buffers = [forward.step, forward.step and forward.step.first_keys]
        for _ in range(2):
            with roofline.OperationRecorder() as recorder:
                forward.decode(ids, slots)
            assert not recorder.waits
            assert not recorder.copies
            sizes = [[size for _, size in (*op.reads, *op.writes)] for op in recorder.operations]
            passes.append(([op.name for op in recorder.operations], sizes))
    assert passes[0] == passes[1]
    assert forward.step is buffers[0]
    assert forward.cache.slot_layers[0].keys is buffers[1]


@pytest.mark.long
def test_an_update_waits_for_the_device_only_between_passes(roofline: ModuleType) -> None:
    job = roofline.Job("0.5b", rows=8, tokens=2048, layers=2)
    update, log_probs = roofline.record(job, "update"), roofline.record(job, "log_probs")
    places = [place.split(":")[0] for _, place in update.waits]
    assert sum(update.waits.values()) <= 6
    assert not {
        "workers/training/passes/forward_backward.py",
        "workers/training/passes/lm_head.py",
    } & {*places}
    twice = roofline.record(replace(job, tokens=1024), "update")
    assert twice.waits.total() == update.waits.total(), "waits grow with the number of passes"
    assert log_probs.waits.total() == 1


def test_the_next_mini_batch_is_prepared_before_the_host_waits_for_the_current_one(
    roofline: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.training.engine import TrainEngine

    prepare, waits = TrainEngine.prepare, []

    def noting(*arguments: Any) -> Any:
        waits.append(_get_current_dispatch_mode().waits.total())
        return prepare(*arguments)

    monkeypatch.setattr(TrainEngine, "prepare", noting)
    job = roofline.Job("0.5b", rows=8, tokens=2048, layers=2, mini_batches=2)
    update = roofline.record(job, "update")
    assert waits == [0, 0, 0, 1], "each mini-batch is prepared, and its passes use that later"
    assert update.waits.total() <= 5


def test_no_gradient_of_shared_prefixes_is_sorted(roofline: ModuleType) -> None:
    job = roofline.Job("0.5b", 8, prompt=1024, response=256, same_prompts=4, layers=2)
    operations = roofline.record(job, "update").operations
    alone = roofline.record(replace(job, shares=False), "update").operations
    assert sum(op.flops for op in operations) < 0.9 * sum(op.flops for op in alone)
    assert not [op.name for op in operations if op.kind == "sorts"]


def test_unfiltered_sampling_on_a_gpu_starts_few_operations(roofline: ModuleType) -> None:
    with roofline.OperationRecorder() as recorder:
        roofline.sample(1024)
    assert len(recorder.operations) <= 112
    assert len(recorder.kernels(compiled=True)) <= 44
    assert not recorder.waits


def test_neighbors_without_a_product_are_one_kernel(roofline: ModuleType) -> None:
    meta = torch.device("meta")
    a, b = (torch.empty(64, 64, device=meta) for _ in range(2))
    with roofline.OperationRecorder() as recorder:
        c = ((a + b) * 2).relu()
        d = c @ a
        (d + 1).sum().item()
    kernels = recorder.kernels(compiled=True)
    assert [kernel.name for kernel in kernels] == ["fused", "mm.default", "fused"]
    assert [kernel.bytes for kernel in kernels] == [3 * 64 * 64 * 4] * 2 + [64 * 64 * 4]
    assert recorder.waits.total() == 1
