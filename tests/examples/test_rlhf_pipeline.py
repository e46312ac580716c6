"""From a base model to a policy: every step improves its own metric."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.scripts import EXAMPLES, bash
from tests.integration.runs import lines

PIPELINE = EXAMPLES / "rlhf_pipeline" / "run.sh"


def cells(report: str, first: str) -> list[float]:
    """Return the numbers of the Markdown table row that begins with `first`."""
    (row,) = re.findall(rf"^\| {first} \|(.*%.*)\|$", report, re.M)
    return [float(cell.strip().rstrip("%")) for cell in row.split("|")]


@pytest.mark.long
@pytest.mark.example
def test_each_step_of_the_pipeline_improves_its_metric(tmp_path: Path, forked_python: Path) -> None:
    small = ("trainer.total_training_steps=6", "trainer.test_freq=-1")
    done = bash(PIPELINE, *small, RUN_DIR=tmp_path, PYTHON=forked_python)
    assert done.returncode == 0, done.stdout + done.stderr

    loss = [line["val/loss"] for line in lines(tmp_path / "sft") if "val/loss" in line]
    assert loss[-1] < 0.1 * loss[0]
    accuracy = "val-core/rm/accuracy"
    accuracies = [line[accuracy] for line in lines(tmp_path / "reward_model") if accuracy in line]
    assert accuracies[0] == 0.5
    assert accuracies[-1] > 0.75
    steps = [line for line in lines(tmp_path / "ppo") if "actor/ptx_loss" in line]
    assert len(steps) == 6

    report = (tmp_path / "report.md").read_text()
    (_, _, base), sft, ppo = (cells(report, name) for name in ("base", "SFT", "PPO"))
    assert sft[0] > 70, "share of sentences"
    assert ppo[1] > sft[1] + 0.15, "kindness, which PPO was not trained with"
    assert base < sft[2] < ppo[2], "score of the reward model"
    assert len(re.findall(r"^\| (?:say|tell|write) of a \w+ \|", report, re.M)) == 6, "texts"

    idle = tmp_path / "python"
    idle.write_text("#!/bin/sh\n")
    idle.chmod(0o755)
    again = bash(PIPELINE, RUN_DIR=tmp_path, PYTHON=idle)
    assert again.stdout.count("skipped, because") == 3, again.stdout + again.stderr
