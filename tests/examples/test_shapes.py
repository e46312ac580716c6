"""A tiny vision-language model learns to name coloured shapes by SFT, then by GRPO."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from examples.shapes.make import write_sheet
from tests import ROOT
from tests.examples.scripts import EXAMPLES, bash
from tests.integration.runs import lines

ACCURACY = "val-core/prompts/acc/mean@1"


@pytest.mark.long
@pytest.mark.example
def test_grpo_names_more_shapes_than_sft(tmp_path: Path, forked_python: Path) -> None:
    run, short = EXAMPLES / "shapes" / "run.sh", "trainer.total_training_steps=60"
    done = bash(run, short, RUN_DIR=tmp_path, PYTHON=forked_python)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [step["train/loss"] for step in lines(tmp_path / "sft")]
    assert losses[-1] < 0.6 * losses[0]
    steps = [step for step in lines(tmp_path / "grpo") if "actor/grad_norm" in step]
    assert max(step["training/rollout_probs_diff_max"] for step in steps) < 2e-5
    after_sft, after_grpo = (
        step[ACCURACY] for step in lines(tmp_path / "grpo") if ACCURACY in step
    )
    assert after_grpo > after_sft + 0.1
    assert f"{after_sft:.3f} after SFT, {after_grpo:.3f} after GRPO" in done.stdout


def test_the_page_shows_the_pictures_that_the_script_draws(tmp_path: Path) -> None:
    write_sheet(tmp_path / "sheet.png")
    shown, drawn = (
        np.asarray(Image.open(file), dtype=float)
        for file in (ROOT / "docs" / "images" / "shapes.png", tmp_path / "sheet.png")
    )
    assert shown.shape == drawn.shape
    assert np.abs(shown - drawn).mean() < 2, "versions of PIL may differ at edges"
