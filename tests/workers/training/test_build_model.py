"""The settings of a process that trains on a GPU."""

from __future__ import annotations

import pytest
import torch

from workers.training import build_model


@pytest.mark.parametrize("variable", [None, *build_model.USER_SETTINGS])
def test_allocator_segments_grow_unless_the_user_sets_the_allocator(
    variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    for name in build_model.USER_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "max_split_size_mb:128")
    build_model.prepare_gpu_process()
    assert settings == ([] if variable else ["expandable_segments:True"])
