"""A line for every start of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.runs import lines
from trainer.run_folder.folder import note_start


def test_starts_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.orig_argv", ["verl-like", "ppo", "a=two words"])
    note_start(tmp_path)
    monkeypatch.setattr("sys.orig_argv", ["verl-like", "ppo", "a=3"])
    note_start(tmp_path)
    first, second = lines(tmp_path, "starts.jsonl")
    assert first["command"] == "verl-like ppo 'a=two words'"
    assert second["command"] == "verl-like ppo a=3"
    assert torch.__version__.startswith(first["versions"]["torch"].partition("+")[0])
    assert first["host"]
