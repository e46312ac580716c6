"""A small model learns sums with carries by SFT, then by GRPO."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from examples.carries.make import make_sums
from tests import ROOT
from tests.examples.scripts import EXAMPLES, bash
from tests.integration.runs import lines

RESULTS = json.loads((ROOT / "docs" / "data" / "results.json").read_text("utf-8"))


@pytest.mark.long
@pytest.mark.example
def test_the_script_trains_by_sft_and_grpo(tmp_path: Path, forked_python: Path) -> None:
    run, short = EXAMPLES / "carries" / "run.sh", "trainer.total_training_steps=2"
    done = bash(run, short, RUN_DIR=tmp_path, PYTHON=forked_python, SFT_STEPS="40")
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [step["train/loss"] for step in lines(tmp_path / "sft")]
    assert losses[-1] < 0.75 * losses[0]
    assert "right answers to 1,000 new sums: 0." in done.stdout


def test_no_sum_is_in_two_files() -> None:
    sums = [tuple(sorted(pair)) for pairs in make_sums().values() for pair in pairs]
    assert len(sums) == len(set(sums)) == 41_000


def test_the_page_has_the_accuracies_of_the_runs() -> None:
    page = (ROOT / "docs" / "carries.md").read_text("utf-8")
    for name, curve in RESULTS["carries"]["curves"].items():
        (row,) = re.findall(rf"^\|? ?{name} ?\|(.*)", page, re.M)
        shown = [float(cell) for cell in re.findall(r"0\.\d{3}", row)]
        assert shown == [round(value, 3) for value in (*curve["0"][:1], *curve["300"])]
