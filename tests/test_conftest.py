"""The modules that processes of tests are forked with are there."""

from __future__ import annotations

import importlib

import pytest

from tests.conftest import PRELOADED


@pytest.mark.parametrize("name", PRELOADED)
def test_a_preloaded_module_can_be_imported(name: str) -> None:
    importlib.import_module(name)
