"""The synchronous run that asynchronous runs without staleness are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import overrides
from trainer import load_config, run


@pytest.fixture(scope="session")
def plain(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a PPO run of three steps, in this process. Read only."""
    folder = tmp_path_factory.mktemp("plain")
    run(load_config(overrides(tiny_dir, folder, "trainer.backend=local")))
    return folder
