"""`verl-like join` becomes `ray start` with the address of the run's cluster."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.cli import join
from verl_like.errors import ConfigError


def test_a_machine_joins_the_cluster_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[Any] = []
    monkeypatch.setattr(os, "execve", lambda *started: commands.append(started))
    (tmp_path / "ray_address.txt").write_text("10.0.0.1:6379")
    join.main([str(tmp_path), "--num-gpus=8"])
    ((program, command, environment),) = commands
    assert program == sys.executable
    assert command[3:] == ["start", "--address=10.0.0.1:6379", "--block", "--num-gpus=8"]
    assert environment["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")


def test_a_folder_without_an_address_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no ray_address.txt \(No such file"):
        join.main([str(tmp_path)])
