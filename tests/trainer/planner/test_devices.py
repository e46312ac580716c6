"""Data sheets of GPUs by the names that drivers report."""

from __future__ import annotations

import pytest

from trainer.planner.cost import data_sheet


@pytest.mark.parametrize(
    ("name", "gpu"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L40", None),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_driver_s_name_has_a_data_sheet(name: str, gpu: str | None) -> None:
    device = data_sheet(name)
    assert (device and device.name) == gpu
