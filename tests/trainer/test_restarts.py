"""A run that loses a worker recovers by itself, with the numbers of an undisturbed run."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
import weakref
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import ray
from ray.exceptions import OutOfMemoryError

from tests.integration.runs import lines, numbers
from tests.trainer.recipes.regression import REGRESSION, RegressionConfig, RegressionTrainer
from trainer import load_config, restarts, run
from trainer.config.recipe import Recipe
from trainer.recipe_command import exit_on_error
from trainer.run_folder.signals import RunInterrupted, StopSignals
from verl_like.backends.ray.transport import RayTransport
from verl_like.config_key import changed
from verl_like.errors import (
    ConfigError,
    InsufficientResourcesError,
    WeightSyncError,
    WorkerDiedError,
)


@dataclass(kw_only=True)
class ChildConfig(RegressionConfig):
    """The student has a separate process."""

    @property
    def child_pools(self) -> frozenset[str]:
        return frozenset({"student_pool"})


class Killer(RegressionTrainer):
    """Its student is killed in step 4, `kills` times."""

    kills: ClassVar[int] = 0

    def step(self) -> dict[str, float]:
        if self.global_step == 4 and Killer.kills:
            Killer.kills -= 1
            os.kill(self.groups["student"].transport.pid_here(0), signal.SIGKILL)
        return super().step()


class ChildrenConfig(RegressionConfig):
    """Student and teacher have separate processes."""

    @property
    def child_pools(self) -> frozenset[str]:
        return frozenset({"student_pool", "teacher_pool"})


class Stopped(RegressionTrainer):
    """Its fourth step loses the student, and the run is told to stop during that."""

    is_told_before: ClassVar[bool] = False

    def step(self) -> dict[str, float]:
        if self.global_step == 4:
            if self.is_told_before:
                signal.raise_signal(signal.SIGTERM)
            os.kill(self.groups["student"].transport.pid_here(0), signal.SIGKILL)
        return super().step()


class Poisoned(RegressionTrainer):
    """Its third step loses its worker every time."""

    def step(self) -> dict[str, float]:
        if self.global_step == 3:
            raise WorkerDiedError("student rank 0 is gone")
        return super().step()


class Refusing(RegressionTrainer):
    """In its third step a weight sync is rejected, once."""

    refusals: ClassVar[int] = 0
    made: ClassVar[weakref.WeakSet[RegressionTrainer]] = weakref.WeakSet()

    def step(self) -> dict[str, float]:
        Refusing.made.add(self)
        self.me = self  # only the collector frees it
        if self.global_step == 3 and not Refusing.refusals:
            Refusing.refusals += 1
            raise WeightSyncError("version 3 was not applied")
        return super().step()


def config(folder: Path, schema: type[RegressionConfig] = RegressionConfig, **trainer: Any) -> Any:
    settings = {"total_training_steps": 6, "save_freq": 2, "logger": [], "backend": "local"}
    settings |= {"default_local_dir": folder, "n_gpus_per_node": 2, **trainer}
    overrides = [f"trainer.{name}={value}".replace("'", "") for name, value in settings.items()]
    return load_config(["placement=split", *overrides], recipe_of(schema))


@cache
def recipe_of(schema: type[RegressionConfig]) -> Recipe[Any]:
    """Return a recipe per schema, whose tree is composed only once."""
    return replace(REGRESSION, schema=schema)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "FIRST_WAIT_S", 0.01)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    run(config(folder))
    return folder


def test_a_killed_worker_is_replaced_and_the_step_made_again_to_the_same_numbers(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Killer, "kills", 1)
    with caplog.at_level("WARNING"):
        run(config(tmp_path / "killed", ChildConfig), Killer)
    assert numbers(tmp_path / "killed") == numbers(whole)
    assert "Restart 1 of 3 (trainer.max_restarts)" in caplog.text
    assert re.search(r"the run restarted after \d+\.\d s and resumes after step 2", caplog.text)
    assert "from global_step_2; 1 finished step repeated." in caplog.text
    assert Killer.kills == 0


def test_a_worker_that_ray_kills_for_its_memory_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(reference: object) -> None:
        raise OutOfMemoryError("Task was killed due to the node running low on memory.")

    monkeypatch.setattr(ray, "get", get)
    words = "Ray killed it because its node ran low on memory"
    with pytest.raises(WorkerDiedError, match=words):
        RayTransport.__new__(RayTransport).fetch("the answer")


@pytest.mark.ray
def test_on_ray_a_killed_worker_is_replaced_too(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: None
) -> None:
    monkeypatch.setattr(Killer, "kills", 2)
    run(config(tmp_path / "killed", backend="ray", device="cpu"), Killer)
    assert numbers(tmp_path / "killed") == numbers(whole)
    assert Killer.kills == 0


def test_after_a_refused_weight_sync_the_run_goes_on_from_its_checkpoint(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Refusing, "refusals", 0)
    with caplog.at_level("WARNING"):
        run(config(tmp_path / "refused"), Refusing)
    assert numbers(tmp_path / "refused") == numbers(whole)
    assert "step 3 failed: version 3 was not applied. Restart 1 of 3" in caplog.text


def test_failed_attempts_are_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(SystemExit) as failed, exit_on_error(tmp_path):
        run(config(tmp_path), Poisoned)
    assert failed.value.code == (
        "error: student rank 0 is gone\n  step 3 failed 3 times, so it is not tried again."
    )
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_waits_grow_without_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(restarts.time, "sleep", waited.append)
    made = restarts.Restarts(config(tmp_path, max_restarts=10))
    for step in (4, 4, 3, 9, 12, 12):
        made.wait_for_next(WorkerDiedError("gone"), step)
    assert [round(seconds / restarts.FIRST_WAIT_S) for seconds in waited] == [1, 2, 4, 1, 1, 2]


def test_max_restarts_0_never_restarts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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


@pytest.mark.parametrize(
    ("is_told_before", "where"), [(True, "in step 4, which lost a worker"), (False, "at once")]
)
def test_a_run_that_is_told_to_stop_while_it_loses_a_role_goes_on_from_its_checkpoint(
    is_told_before: bool, where: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stopped, "is_told_before", is_told_before)
    told = (lambda *_: None) if is_told_before else (lambda *_: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(restarts.Restarts, "_pause", told)
    with pytest.raises(RunInterrupted, match=f"Stopped by SIGTERM {where}"):
        run(config(tmp_path, ChildrenConfig), Stopped)
    newest = tmp_path / "latest_checkpointed_iteration.txt"
    assert newest.read_text() == "2"
    run(config(tmp_path))
    assert numbers(tmp_path) == numbers(whole)


def test_a_stop_ends_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    with StopSignals() as stop, stop.deferred():
        made = restarts.Restarts(config(tmp_path), stop)

        def sleep(seconds: float) -> None:
            waited.append(seconds)
            signal.raise_signal(signal.SIGTERM)

        monkeypatch.setattr(restarts.time, "sleep", sleep)
        monkeypatch.setattr(restarts, "FIRST_WAIT_S", 1000.0)
        made.wait_for_next(WorkerDiedError("gone"), 1)
    assert waited == [restarts.LOOK_AGAIN_S]


def with_a_restart(folder: Path, stop: StopSignals | None = None, **timeouts: float) -> Any:
    """Run with this time limit for waiting for nodes."""
    waits = config(folder).timeouts | timeouts
    made = restarts.Restarts(changed(config(folder), {"timeouts": waits}), stop)
    made.wait_for_next(WorkerDiedError("gone"), 1)
    return made


def test_a_restart_waits_for_room_and_a_first_start_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(restarts, "FIRST_MESSAGE_S", 0.0)
    monkeypatch.setattr(restarts, "LOOK_AGAIN_S", 0.001)
    tries: list[int] = []

    def start() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise InsufficientResourcesError("node 7 is gone.")
        return "started"

    since = time.monotonic()
    with pytest.raises(InsufficientResourcesError, match=r"^node 7 is gone\.$"):
        restarts.Restarts(config(tmp_path)).wait_for_capacity(start, since)
    with caplog.at_level("WARNING"):
        assert with_a_restart(tmp_path).wait_for_capacity(start, since) == "started"
    assert len(tries) == 3
    said = r"the restart: waiting for a node \(node 7 is gone\) for \d+ s \(limit 120 s\)"
    assert re.search(said, caplog.text)


def test_where_no_room_comes_in_time_or_the_run_is_told_to_stop_it_ends(tmp_path: Path) -> None:
    def start() -> None:
        raise InsufficientResourcesError("node 7 is gone.")

    since = time.monotonic() - 9
    with pytest.raises(
        InsufficientResourcesError, match=r"gone\. After \d+ s .* \(timeouts\.placement_s=8\)"
    ):
        with_a_restart(tmp_path, placement_s=8.0).wait_for_capacity(start, since)
    with StopSignals() as stop, stop.deferred():
        made = with_a_restart(tmp_path, stop)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(RunInterrupted, match="SIGTERM while it waited for a node"):
            made.wait_for_capacity(start, since)
