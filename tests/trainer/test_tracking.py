"""A step's numbers are on disk when `log` returns, with every digit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trainer.tracking import Tracking
from verl_like.errors import ConfigError


def test_a_line_is_on_disk_at_once_with_every_digit(tmp_path: Path) -> None:
    with Tracking(tmp_path / "new", ["console"]) as tracking:
        for step, value in enumerate((0.1 + 0.2, np.float32(1 / 3)), 1):
            tracking.log({"loss": value}, step)
            lines = (tmp_path / "new" / "metrics.jsonl").read_text().splitlines()
            assert json.loads(lines[-1]) == {"step": step, "loss": float(value)}
        assert len(lines) == 2


def test_the_console_is_a_choice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Tracking(tmp_path, []) as quiet:
        quiet.log({"loss": 1.0}, 1)
    assert capsys.readouterr().out == ""
    with Tracking(tmp_path, ["console"]) as loud:
        loud.log({"loss": 1.0}, 1)
    assert capsys.readouterr().out == "step 1: loss 1\n"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="trainer.default_local_dir="):
        Tracking(tmp_path / "file")
