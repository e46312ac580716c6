"""The metrics of used GPU and machine memory have verl's names."""

from __future__ import annotations

import pytest
import torch

from workers.training import mfu as device_memory
from workers.training.mfu import memory_in_use


def test_memory_metrics_of_device_and_machine_are_in_gib(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peaks = {torch.device("cuda", 1): 3 * 2**29}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peaks.__getitem__)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 * peaks[device])
    monkeypatch.setattr(device_memory, "memory_gb", {"MemTotal:": 16.0, "MemAvailable:": 6.5}.get)
    assert memory_in_use(torch.device("cuda", 1)) == {
        "perf/max_memory_allocated_gb": 1.5,
        "perf/max_memory_reserved_gb": 3.0,
        "perf/cpu_memory_used_gb": 9.5,
    }
    assert memory_in_use(torch.device("cpu")) == {"perf/cpu_memory_used_gb": 9.5}


def test_a_machine_without_memory_information_has_no_metric(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_memory, "memory_gb", lambda field: None)
    assert memory_in_use(torch.device("cpu")) == {}
