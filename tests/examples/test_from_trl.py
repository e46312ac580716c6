"""The acid test: a run of TRL and a run of ours coincide, with what the tools print."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.scripts import EXAMPLES

NOT_NAMED = "TRL_PYTHON, the Python of an environment with TRL 1.16, is not set"


@pytest.mark.long
@pytest.mark.skipif("TRL_PYTHON" not in os.environ, reason=NOT_NAMED)
def test_trl_and_ours_coincide_with_a_tiny_model(tmp_path: Path, tiny_dir: Path) -> None:
    script = str(EXAMPLES / "from_trl/acid_test.py")
    model = ["--model", str(tiny_dir / "model"), "--out", str(tmp_path / "out"), "--steps", "4"]
    settings = ["trainer.backend=local", "data.max_prompt_length=256"]
    done = subprocess.run(
        [sys.executable, script, *model, *settings], capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal in 5 steps" in done.stdout


def test_without_trl_the_example_says_what_it_needs(tmp_path: Path) -> None:
    script = str(EXAMPLES / "from_trl/acid_test.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRL_PYTHON"}
    done = subprocess.run(
        [sys.executable, script, "--model", "m", "--out", str(tmp_path / "out")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "TRL_PYTHON is not set" in done.stderr
