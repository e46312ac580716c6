"""`docs/checkpoints.md` does what it says: its Python runs, its command composes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from trainer import load_config

TEXT = (Path(__file__).resolve().parents[1] / "docs" / "checkpoints.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.S)


def test_the_python_runs(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(tiny_dir)
    names: dict[str, Any] = {}
    for block in blocks("python"):
        exec(compile(block, "docs/checkpoints.md", "exec"), names)
    assert len(blocks("python")) == 4
    written = {path.name for path in Path("runs/export/global_step_1").iterdir()}
    assert {"commit.json", "trainer.json", "random.pt", "actor", "critic", "rollout"} <= written
    assert {path.name for path in Path("runs/export/global_step_1/actor").iterdir()} == {
        *("manifest.json", "shards", "random", "huggingface"),
    }


@pytest.mark.parametrize("command", blocks("bash"))
def test_the_command_composes(command: str) -> None:
    program, *overrides = shlex.split(command.replace("\\\n", " "))[2:]
    assert program == "trainer.main_ppo"
    assert load_config(overrides).trainer.save_freq == 2
