"""The operations and peaks in `perf/mfu/…`, and the metrics of memory, which have verl's names."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.workers.samples import make_batch, started, tiny_config
from workers.cpu import onednn
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.training import mfu as utilization
from workers.training.mfu import memory_in_use, needed_flops, peak_flops

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def torch_counts_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable oneDNN: torch's counter counts only its own matrix products."""
    monkeypatch.setattr(onednn, "MIN_MULTIPLICATIONS", 2**60)


def worker(cls: type, tiny_dir: Any, **model: Any) -> Any:
    sizes = {"ppo_mini_batch_size": 8, "ppo_micro_batch_size_per_gpu": 8}
    config = tiny_config(tiny_dir, model=model, **sizes)
    config.critic.ppo_micro_batch_size_per_gpu = 8
    return started(cls, config, 10)


@pytest.mark.parametrize(
    ("cls", "method"),
    [
        (ActorWorker, "compute_log_prob"),
        (ActorWorker, "update_actor"),
        (CriticWorker, "update_critic"),
    ],
)
def test_the_count_matches_torch_s_flop_counter(cls: type, method: str, tiny_dir: Any) -> None:
    role = worker(cls, tiny_dir, use_remove_padding=False, attn_implementation="eager")
    batch = make_batch(8)
    batch.batch["attention_mask"][:] = batch.batch["response_mask"][:] = 1  # no padding
    batch.batch["position_ids"][:] = torch.arange(batch.batch["position_ids"].shape[1])
    with FlopCounterMode(display=False) as counter:
        getattr(role, method)(batch)
    flops = needed_flops(role.engine, trains=method != "compute_log_prob")
    # on padded rows a critic runs its head of one column at every position
    assert flops == pytest.approx(counter.get_total_flops(), rel=1e-3)


def test_frozen_weights_get_no_gradient(tiny_dir: Any) -> None:
    adapted, full = (
        worker(ActorWorker, tiny_dir, lora_rank=4, lora_alpha=8),
        worker(ActorWorker, tiny_dir),
    )
    with FlopCounterMode(display=False) as counter:
        adapted.update_actor(make_batch(8))
    full.update_actor(make_batch(8))
    flops, of_all = (needed_flops(role.engine, trains=True) for role in (adapted, full))
    assert flops == pytest.approx(counter.get_total_flops(), rel=0.1)
    assert flops < 0.8 * of_all


def test_a_known_peak_gives_its_used_fraction(
    tiny_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch(8)
    actor, critic = worker(ActorWorker, tiny_dir), worker(CriticWorker, tiny_dir)
    actor.engine.spec = replace(actor.engine.spec, epochs=2)
    clock = iter(range(100))  # every pass takes a second
    monkeypatch.setattr(utilization.time, "perf_counter", lambda: float(next(clock)))
    fractions = {}
    for peak in (1e9, math.nan, None):
        monkeypatch.setattr(utilization, "peak_flops", lambda device, peak=peak: peak)
        _, inferred = actor.compute_log_prob(batch)
        of_log_probs = needed_flops(actor.engine, trains=False)
        metrics = inferred | actor.update_actor(batch) | critic.update_critic(batch)
        fractions[peak] = {k: v for k, v in metrics.items() if k.startswith("perf/mfu/")}
    of_known, *others = fractions.values()
    assert others == [{}, {}]
    assert of_known == pytest.approx(
        {
            "perf/mfu/actor_infer": of_log_probs / 1e9,
            "perf/mfu/actor": 2 * 3 * of_log_probs / 1e9,
            "perf/mfu/critic": needed_flops(critic.engine, trains=True) / 1e9,
        }
    )


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA RTX A3000 Laptop GPU", math.nan),
    ],
)
def test_a_gpu_s_peak_follows_from_its_name(
    name: str, peak: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == pytest.approx(peak, nan_ok=True)
    assert peak_flops(CPU) is None


def test_memory_metrics_of_device_and_machine_are_in_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 1)
    peaks = {device: 3 * 2**29}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peaks.__getitem__)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 * peaks[device])
    monkeypatch.setattr(utilization, "memory_gib", {"MemTotal:": 16.0, "MemAvailable:": 6.5}.get)
    assert memory_in_use(device) == {
        "perf/max_memory_allocated_gb": 1.5,
        "perf/max_memory_reserved_gb": 3.0,
        "perf/cpu_memory_used_gb": 9.5,
    }
    assert memory_in_use(CPU) == {"perf/cpu_memory_used_gb": 9.5}
    monkeypatch.setattr(utilization, "memory_gib", lambda field: None)
    assert memory_in_use(CPU) == {}, "a machine without memory information has no metric"
