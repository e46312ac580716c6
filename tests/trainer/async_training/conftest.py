"""A synchronous run to compare asynchronous runs with, and a small validation file."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from tests.integration.runs import overrides
from trainer import load_config, run


@pytest.fixture(scope="session")
def plain(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a PPO run of three steps, in this process. Read only."""
    folder = tmp_path_factory.mktemp("plain")
    run(load_config(overrides(tiny_dir, folder, "trainer.backend=local")))
    return folder


@pytest.fixture(scope="session")
def few_validated(make_tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The setting of eight rows to validate on."""
    file = tmp_path_factory.mktemp("validated") / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, make_tiny.make_rows(8, "val"))))
    return f"data.val_files={file}"
