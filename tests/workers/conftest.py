"""A model of one layer, and groups whose ranks are threads, with a weight sync."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.workers.stand_ins import Group, Receiver, Sender


@pytest.fixture(scope="session")
def one_layer_dir(make_tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like `tiny_dir` whose model has one layer."""
    folder = tmp_path_factory.mktemp("one layer")
    path: Path = make_tiny.make(folder, num_train=1, num_val=1, num_layers=1)
    return path


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Group:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return Group([Sender(0), Sender(1)])


@pytest.fixture
def rollout() -> Group:
    return Group([Receiver(0, 2), Receiver(1, 2)])
