"""An asynchronous run ends after the requested prompts, or with an error that explains it."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.forked import run_program
from tests.integration.runs import FEW_ROWS, POLICY_ALONE, lines, overrides
from tests.trainer.async_training.test_run import LOCAL, ledger_of, run_async
from tests.trainer.async_training.uids import uids_of
from trainer.cli import main
from trainer.data.prompts import PromptLoader

RIGGED = "tests.trainer.async_training.rigged_workers"


def test_total_prompts_may_span_several_epochs(tiny_dir: Path, tmp_path: Path) -> None:
    total = ("data.total_prompts=150", "data.train_batch_size=60", "async_training.generators=2")
    sizes = ("actor_rollout_ref.actor.ppo_mini_batch_size=30", "data.max_response_length=1")
    more = (*sizes, *POLICY_ALONE, "trainer.total_training_steps=null")
    folder = run_async(tiny_dir, tmp_path, *total, *more)
    assert ledger_of(folder)["trainers"] == {"0": 2 * 150}
    assert len(set(sum(uids_of(folder, 3), []))) == 150
    assert len(lines(folder)) == 3


def test_a_run_without_enough_prompts_ends_early_with_a_message(
    tiny_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(PromptLoader, "num_prompts", lambda _, number: 4 if number < 2 else 0)
    steps = "trainer.total_training_steps=50"
    folder = run_async(tiny_dir, tmp_path, steps, *POLICY_ALONE, *FEW_ROWS)
    assert "the run ends after step 2: there are no more prompts" in capsys.readouterr().out
    assert ledger_of(folder)["trainers"] == {"0": 2 * 8}


def test_an_error_in_an_update_names_its_samples(tiny_dir: Path, tmp_path: Path) -> None:
    fails = f"role_workers.actor={RIGGED}.FailsInSecondUpdate"
    with pytest.raises(ValueError, match="no gradient of this") as error:
        run_async(tiny_dir, tmp_path, *POLICY_ALONE, *FEW_ROWS, fails)
    failed = re.search(r"no gradient of this at ([0-9.]+)", str(error.value))
    assert failed is not None
    assert time.time() - float(failed[1]) < 10
    uids = [row["uid"] for row in lines(tmp_path, "rollouts/2.jsonl")]
    (note,) = [note for note in error.value.__notes__ if note.startswith("step 2 is processing")]
    named = note.removeprefix("step 2 is processing the samples of uid ").split(", ")
    assert len(named) == 4
    assert set(named) <= set(uids)


@pytest.mark.long
def test_the_command_names_a_lost_generator_within_seconds(tiny_dir: Path, tmp_path: Path) -> None:
    dies = f"role_workers.rollout_1={RIGGED}.DiesAtOnce"
    # more steps than one generator completes before the loss is noticed
    many = "trainer.total_training_steps=50"
    settings = ("async_training.generators=2", many, *POLICY_ALONE, *FEW_ROWS)
    arguments = overrides(tiny_dir, tmp_path, LOCAL, dies, *settings)
    done = run_program(main.main, "async", *arguments, folder=ROOT)
    took = time.time() - float((tmp_path / "killed_at").read_text())
    assert done.returncode == 1
    assert "generator 1 died with" in done.stderr
    assert "killed by SIGKILL" in done.stderr
    assert "on_generator_failure=restart" in done.stderr
    assert took < 15


def test_a_generator_that_cannot_be_built_ends_the_run(tiny_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such engine"):
        run_async(tiny_dir, tmp_path, f"role_workers.rollout={RIGGED}.CannotBeBuilt", *POLICY_ALONE)
