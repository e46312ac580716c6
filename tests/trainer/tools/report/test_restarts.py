"""The report's description of restarts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.recipes.regression import REGRESSION
from trainer import load_config, recovery
from trainer.recovery import Restarts
from trainer.tools.report.page import describe_restarts
from verl_like.errors import WorkerDiedError


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Restarts:
    monkeypatch.setattr(recovery, "FIRST_WAIT_S", 0.0)
    settings = [f"trainer.default_local_dir={tmp_path}", "trainer.backend=local"]
    return Restarts(load_config(settings, REGRESSION))


def test_restarts_and_their_samples_are_counted(record: Restarts, tmp_path: Path) -> None:
    record.wait_for_next(WorkerDiedError("rank 1 is gone"), 3)
    record.note_samples(3, 6, 2)
    record.wait_for_next(WorkerDiedError("rank 0 is gone"), 5)
    record.note_samples(5, 0, 8)
    assert describe_restarts(tmp_path) == [
        "restarts: 2, in step 3, 5; samples of lost groups: 6 kept, 10 regenerated"
    ]


def test_the_restored_state_and_the_repeated_steps_are_shown(
    record: Restarts, tmp_path: Path
) -> None:
    for failed, goes_on_after, source in ((3, 2, "actor rank 1"), (9, 6, "global_step_6")):
        record.wait_for_next(WorkerDiedError("rank 0 is gone"), failed)
        record.begin(goes_on_after, source)
    assert describe_restarts(tmp_path) == [
        "restarts: 2, in step 3, 9; in step 3 with the state of actor rank 1, no finished step is "
        "lost; in step 9 with the state of global_step_6, 2 finished steps repeated"
    ]


def test_a_new_run_starts_a_new_record(record: Restarts, tmp_path: Path) -> None:
    (tmp_path / "restarts.jsonl").write_text('{"step": 9, "lost": "of an earlier run"}\n')
    record.begin(0, "the beginning")
    assert describe_restarts(tmp_path) == []
    record.wait_for_next(WorkerDiedError("rank 1 is gone"), 1)
    record.begin(0, "the beginning")
    assert describe_restarts(tmp_path) == [
        "restarts: 1, in step 1; in step 1 with the state of the beginning, "
        "no finished step is lost"
    ]


def test_the_third_failure_of_a_step_has_no_attempt_left(record: Restarts) -> None:
    assert not record.has_attempts(0), "a start that fails is not tried again"
    for _ in range(2):
        assert record.has_attempts(4)
        record.wait_for_next(WorkerDiedError("gone"), 4)
    assert not record.has_attempts(4), "it would be the third time that this step fails"
    assert record.has_attempts(5)
