"""A run that loses a worker goes on by itself, to the numbers of an undisturbed one."""

from __future__ import annotations

import logging
import os
import signal
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.integration.runs import lines, numbers
from tests.trainer.recipes.regression import REGRESSION, RegressionConfig, RegressionTrainer
from trainer import load_config, restarts, run
from verl_like.errors import ConfigError, WeightSyncError, WorkerDiedError


@dataclass(kw_only=True)
class ChildConfig(RegressionConfig):
    """The student has a process of its own."""

    @property
    def child_pools(self) -> frozenset[str]:
        return frozenset({"student_pool"})


class Killer(RegressionTrainer):
    """Its student is killed in step 4, as often as `kills` says."""

    kills: ClassVar[int] = 0

    def step(self) -> dict[str, float]:
        if self.global_step == 4 and Killer.kills:
            Killer.kills -= 1
            os.kill(self.groups["student"].transport.pid_here(0), signal.SIGKILL)
        return super().step()


class Poisoned(RegressionTrainer):
    """Its third step loses its worker every time."""

    def step(self) -> dict[str, float]:
        if self.global_step == 3:
            raise WorkerDiedError("student rank 0 is gone")
        return super().step()


class Refusing(RegressionTrainer):
    """In its third step a weight sync is refused, once."""

    refusals: ClassVar[int] = 0
    made: ClassVar[weakref.WeakSet[RegressionTrainer]] = weakref.WeakSet()

    def step(self) -> dict[str, float]:
        Refusing.made.add(self)
        self.me = self  # only the collector frees it
        if self.global_step == 3 and not Refusing.refusals:
            Refusing.refusals += 1
            raise WeightSyncError("version 3 was not taken over")
        return super().step()


def config(folder: Path, schema: type[RegressionConfig] = RegressionConfig, **trainer: Any) -> Any:
    settings = {"total_training_steps": 6, "save_freq": 2, "logger": [], "backend": "local"}
    settings |= {"default_local_dir": folder, "n_gpus_per_node": 2, **trainer}
    recipe = replace(REGRESSION, schema=schema)
    overrides = [f"trainer.{name}={value}".replace("'", "") for name, value in settings.items()]
    return load_config(["placement=split", *overrides], recipe)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_WAIT_S", 0.01)


def test_a_killed_worker_is_replaced_and_the_step_made_again_to_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run(config(tmp_path / "whole"))
    monkeypatch.setattr(Killer, "kills", 1)
    with caplog.at_level("WARNING"):
        run(config(tmp_path / "killed", ChildConfig), Killer)
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    assert "Restart 1 of 3 (trainer.max_restarts)" in caplog.text
    assert "group student (student_pool) is back after" in caplog.text
    assert "the run goes on after step 2." in caplog.text
    assert Killer.kills == 0


@pytest.mark.ray
def test_on_ray_a_killed_worker_is_replaced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: None
) -> None:
    run(config(tmp_path / "whole"))
    monkeypatch.setattr(Killer, "kills", 2)
    run(config(tmp_path / "killed", backend="ray", device="cpu"), Killer)
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    assert Killer.kills == 0


def test_after_a_refused_weight_sync_the_run_goes_on_from_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Refusing, "refusals", 0)
    run(config(tmp_path / "whole"))
    with caplog.at_level("WARNING"):
        run(config(tmp_path / "refused"), Refusing)
    assert numbers(tmp_path / "refused") == numbers(tmp_path / "whole")
    assert "step 3 failed: version 3 was not taken over. Restart 1 of 3" in caplog.text


def test_nothing_is_kept_of_the_attempt_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # pytest keeps records
    monkeypatch.setattr(Refusing, "refusals", 0)
    monkeypatch.setattr(Refusing, "made", weakref.WeakSet())
    left = []

    class Counter:
        def on_step_end(self, trainer: RegressionTrainer, metrics: dict[str, float]) -> None:
            left.append(set(Refusing.made) - {trainer})

    run(config(tmp_path), Refusing, callbacks=[Counter()])
    assert left == [set()] * 6


def test_a_step_that_fails_three_times_ends_the_run_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(WorkerDiedError, match="student rank 0 is gone") as failed:
        run(config(tmp_path), Poisoned)
    assert "step 3 has failed 3 times: it is not tried again." in failed.value.__notes__
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_the_wait_grows_only_while_the_run_gets_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(restarts.time, "sleep", waited.append)
    made = restarts.Restarts(config(tmp_path, max_restarts=10))
    for step in (4, 4, 3, 9, 12, 12):
        made.wait_for_next(WorkerDiedError("gone"), step)
    assert [round(seconds / restarts.FIRST_WAIT_S) for seconds in waited] == [1, 2, 4, 1, 1, 2]


def test_no_restart_is_made_where_none_is_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"), pytest.raises(WorkerDiedError):
        run(config(tmp_path, max_restarts=0), Poisoned)
    assert "Restart" not in caplog.text


def test_an_error_of_the_run_itself_is_not_tried_again(tmp_path: Path) -> None:
    class Wrong(RegressionTrainer):
        tries = 0

        def step(self) -> dict[str, float]:
            Wrong.tries += 1
            raise ConfigError("no such thing")

    with pytest.raises(ConfigError):
        run(config(tmp_path), Wrong)
    assert Wrong.tries == 1
