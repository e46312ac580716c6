"""The settings of a process that trains on a GPU."""

from __future__ import annotations

import pytest
import torch

from workers.training import build


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", found.append)
    for name in build.USER_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    return found


def test_allocator_segments_can_grow(settings: list[str]) -> None:
    build.prepare_gpu_process()
    assert settings == ["expandable_segments:True"]


@pytest.mark.parametrize("name", build.USER_SETTINGS)
def test_the_allocator_of_the_user_stays(
    name: str, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:128")
    build.prepare_gpu_process()
    assert settings == []
