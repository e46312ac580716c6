"""The tutorial of a first environment, with its own code and commands."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests import ROOT
from trainer.cli.main import main

PAGE = (ROOT / "docs" / "first_environment.md").read_text(encoding="utf-8")
STEPS = "trainer.total_training_steps=100"


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a line of the page; `echo … |` is its input."""
    echoed, _, words = command.rpartition(" | ")
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(shlex.split(echoed)[1:])))
    monkeypatch.setattr(sys, "argv", shlex.split(words))
    main()


@pytest.mark.parametrize("steps", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_the_tutorial_runs_and_its_game_is_learned(
    steps: int,
    tmp_path: Path,
    tiny_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").symlink_to(tiny_dir)
    (game,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    (tmp_path / "lookup.py").write_text(game, encoding="utf-8")
    lines = re.findall(r"^((?:echo|verl-like) .*)", PAGE.replace("\\\n", " "), re.M)
    assert [line.split()[1] for line in lines[:3]] == ["make-tiny", "check-environment", "ppo"]

    for line in lines[1:]:
        run(line.replace(STEPS, STEPS.replace("100", str(steps))), monkeypatch)
    output = capfd.readouterr().out
    assert "): 'c', reward 1\n" in output
    assert "): end, reward 1\n" in output

    folder = tmp_path / "runs" / "lookup"
    assert (folder / "report.html").is_file()
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == steps
    if steps == 100:
        assert metrics[0]["critic/score/mean"] < 0.1
        assert metrics[-1]["critic/score/mean"] > 1.5
