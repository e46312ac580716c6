"""What the three packages offer by name is a sorted list, and every name on it is there."""

from __future__ import annotations

import importlib

import pytest


@pytest.mark.parametrize("package", ["verl_like", "workers", "trainer"])
def test_public_names_are_sorted_and_exist(package: str) -> None:
    module = importlib.import_module(package)
    names = list(module.__all__)
    assert names == sorted(names)
    assert [name for name in names if not hasattr(module, name)] == []
