"""A process's memory peaks have verl's names where it has a GPU."""

from __future__ import annotations

import pytest
import torch

from workers.device_memory import memory_peaks


def test_peaks_are_those_of_the_device_in_gibibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = {torch.device("cuda", 1): 3 * 2**29}
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", peaks.__getitem__)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 * peaks[device])
    assert memory_peaks(torch.device("cuda", 1)) == {
        "perf/max_memory_allocated_gb": 1.5,
        "perf/max_memory_reserved_gb": 3.0,
    }
    assert memory_peaks(torch.device("cpu")) == {}
