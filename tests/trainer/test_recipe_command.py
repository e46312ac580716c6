"""A training command never ends because of its console."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests import ROOT
from tests.integration.runs import lines

RUNS = """
import sys
from tests.trainer.recipes.regression import REGRESSION
from trainer.recipe_command import run_command
run_command(REGRESSION, sys.argv[1:])
"""


def test_a_full_console_does_not_end_a_run(forked_python: Path, tmp_path: Path) -> None:
    settings = [f"trainer.default_local_dir={tmp_path}", "trainer.total_training_steps=2"]
    with open("/dev/full", "wb") as console:
        run = [forked_python, "-c", RUNS, "trainer.backend=local", *settings]
        done = subprocess.run(run, cwd=ROOT, stdout=console, stderr=console, check=False)
    assert done.returncode == 0
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
