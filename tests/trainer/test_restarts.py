"""A run that loses a worker recovers by itself, with the numbers of an undisturbed run."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import ray
from ray.exceptions import OutOfMemoryError

from tests.integration.runs import lines, numbers
from tests.trainer.recipes.regression import REGRESSION, RegressionConfig, RegressionTrainer
from tests.trainer.test_loop import config as regression
from trainer import lost_groups, recovery, run
from trainer.config.schema import Recipe
from trainer.lost_groups import restart_groups
from trainer.recipe_command import exit_on_error
from trainer.run_folder.signals import RunInterrupted, StopSignals
from verl_like.backends.ray.transport import RayTransport
from verl_like.config_key import replace_keys
from verl_like.errors import (
    ConfigError,
    InsufficientResourcesError,
    PlacementError,
    WeightSyncError,
    WorkerDiedError,
)


class Killer(RegressionTrainer):
    """Kills its student in step 4, `kills` times."""

    kills: ClassVar[int] = 0

    def step(self) -> dict[str, float]:
        if self.global_step == 4 and Killer.kills:
            Killer.kills -= 1
            os.kill(self.groups["student"].transport.pid_here(0), signal.SIGKILL)
        return super().step()


@dataclass(kw_only=True)
class ChildrenConfig(RegressionConfig):
    """Student and teacher have separate processes."""

    @property
    def child_pools(self) -> frozenset[str]:
        return frozenset({"student_pool", "teacher_pool"})


CHILDREN = replace(REGRESSION, schema=ChildrenConfig)


class Stopped(RegressionTrainer):
    """Its fourth step loses the student, possibly after a signal to stop."""

    is_signalled: ClassVar[bool] = False

    def step(self) -> dict[str, float]:
        if self.global_step == 4:
            if self.is_signalled:
                signal.raise_signal(signal.SIGTERM)
            os.kill(self.groups["student"].transport.pid_here(0), signal.SIGKILL)
        return super().step()


class Poisoned(RegressionTrainer):
    """Its third step loses its worker every time."""

    def step(self) -> dict[str, float]:
        if self.global_step == 3:
            raise WorkerDiedError("student rank 0 is gone")
        return super().step()


class FailingSync(RegressionTrainer):
    """Its third step fails once, in a weight sync."""

    failures: ClassVar[int] = 0
    instances: ClassVar[weakref.WeakSet[RegressionTrainer]] = weakref.WeakSet()

    def step(self) -> dict[str, float]:
        FailingSync.instances.add(self)
        self.me = self  # only the collector frees it
        if self.global_step == 3 and not FailingSync.failures:
            FailingSync.failures += 1
            raise WeightSyncError("version 3 was not applied")
        return super().step()


def config(folder: Path, recipe: Recipe[Any] = REGRESSION, **trainer: Any) -> Any:
    return regression(folder, "split", recipe, **trainer)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "FIRST_WAIT_S", 0.01)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    run(config(folder))
    return folder


def test_a_killed_worker_is_replaced_and_the_step_is_repeated(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Killer, "kills", 1)
    with caplog.at_level("WARNING"):
        run(config(tmp_path / "killed", CHILDREN), Killer)
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
        RayTransport.__new__(RayTransport).fetch("a result")


@pytest.mark.ray
def test_a_killed_worker_is_replaced_on_ray(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_session: None
) -> None:
    monkeypatch.setattr(Killer, "kills", 2)
    run(config(tmp_path / "killed", backend="ray", device="cpu"), Killer)
    assert numbers(tmp_path / "killed") == numbers(whole)
    assert Killer.kills == 0


def test_failed_attempts_are_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # pytest keeps records
    monkeypatch.setattr(FailingSync, "failures", 0)
    monkeypatch.setattr(FailingSync, "instances", weakref.WeakSet())
    others = []

    class Counter:
        def on_step_end(self, trainer: RegressionTrainer, metrics: dict[str, float]) -> None:
            others.append(set(FailingSync.instances) - {trainer})

    run(config(tmp_path), FailingSync, callbacks=[Counter()])
    assert others == [set()] * 6


def test_a_step_that_fails_three_times_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as failed, exit_on_error(tmp_path):
        run(config(tmp_path), Poisoned)
    assert failed.value.code == (
        "error: student rank 0 is gone\n  step 3 failed 3 times, so it is not tried again."
    )
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_waits_grow_without_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(recovery.time, "sleep", waited.append)
    several = recovery.Restarts(config(tmp_path, max_restarts=10))
    for step in (4, 4, 3, 9, 12, 12):
        several.wait_for_next(WorkerDiedError("gone"), step)
    assert [round(seconds / recovery.FIRST_WAIT_S) for seconds in waited] == [1, 2, 4, 1, 1, 2]


def test_max_restarts_0_never_restarts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"), pytest.raises(WorkerDiedError):
        run(config(tmp_path, max_restarts=0), Poisoned)
    assert "Restart" not in caplog.text


def test_an_error_in_the_configuration_is_not_retried(tmp_path: Path) -> None:
    class Wrong(RegressionTrainer):
        tries = 0

        def step(self) -> dict[str, float]:
            Wrong.tries += 1
            raise ConfigError("no such thing")

    with pytest.raises(ConfigError):
        run(config(tmp_path), Wrong)
    assert Wrong.tries == 1


@pytest.mark.parametrize(
    ("is_signalled", "where"), [(True, "in step 4, which lost a worker"), (False, "at once")]
)
def test_a_run_resumes_after_it_loses_a_role_and_is_stopped(
    is_signalled: bool, where: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes in the step, or in the pause before its repetition."""
    monkeypatch.setattr(Stopped, "is_signalled", is_signalled)
    pause = (lambda *_: None) if is_signalled else (lambda *_: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(recovery.Restarts, "_pause", pause)
    with pytest.raises(RunInterrupted, match=f"Stopped by SIGTERM {where}"):
        run(config(tmp_path, CHILDREN), Stopped)
    newest = tmp_path / "latest_checkpointed_iteration.txt"
    assert newest.read_text() == "2"
    run(config(tmp_path))
    assert numbers(tmp_path) == numbers(whole)


def test_a_stop_ends_a_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    with StopSignals() as stop, stop.deferred():
        stopping = recovery.Restarts(config(tmp_path), stop)

        def sleep(seconds: float) -> None:
            waited.append(seconds)
            signal.raise_signal(signal.SIGTERM)

        monkeypatch.setattr(recovery.time, "sleep", sleep)
        monkeypatch.setattr(recovery, "FIRST_WAIT_S", 1000.0)
        stopping.wait_for_next(WorkerDiedError("gone"), 1)
    assert waited == [recovery.LOOK_AGAIN_S]


def after_one_restart(folder: Path, stop: StopSignals | None = None, **timeouts: float) -> Any:
    """Return the restarts of a run with these timeouts."""
    run_config = config(folder)
    run_config = replace_keys(run_config, {"timeouts": run_config.timeouts | timeouts})
    one_restart = recovery.Restarts(run_config, stop)
    one_restart.wait_for_next(WorkerDiedError("gone"), 1)
    return one_restart


def test_only_a_restart_waits_for_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lost_groups, "FIRST_MESSAGE_S", 0.0)
    monkeypatch.setattr(recovery, "LOOK_AGAIN_S", 0.001)
    tries = 0

    def start() -> str:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise InsufficientResourcesError("node 7 is gone.")
        return "started"

    since = time.monotonic()
    with pytest.raises(InsufficientResourcesError, match=r"^node 7 is gone\.$"):
        recovery.Restarts(config(tmp_path)).wait_for_capacity(start, since)
    with caplog.at_level("WARNING"):
        assert after_one_restart(tmp_path).wait_for_capacity(start, since) == "started"
    assert tries == 3
    words = r"the restart: waiting for a node \(node 7 is gone\) for \d+ s \(limit 120 s\)"
    assert re.search(words, caplog.text)


def test_a_timeout_or_a_signal_ends_the_wait_for_room(tmp_path: Path) -> None:
    def start() -> None:
        raise InsufficientResourcesError("node 7 is gone.")

    since = time.monotonic() - 9
    with pytest.raises(
        InsufficientResourcesError, match=r"gone\. After \d+ s .* \(timeouts\.placement_s=8\)"
    ):
        after_one_restart(tmp_path, placement_s=8.0).wait_for_capacity(start, since)
    with StopSignals() as stop, stop.deferred():
        stopping = after_one_restart(tmp_path, stop)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(RunInterrupted, match="SIGTERM while it waited for a node"):
            stopping.wait_for_capacity(start, since)


ROLLOUT = frozenset({"rollout"})


class Groups:
    """Stand-in for a run's groups: actor, critic and rollout in their own pools, or in `pools`."""

    config = SimpleNamespace(optional_pools=())

    def __init__(self, lost: list[str], **pools: list[str]) -> None:
        self.calls: list[str] = []
        self.lost = lost
        self.pools = pools or {"actor": ["actor"], "critic": ["critic"], "rollout": ["rollout"]}

    def lost_pools(self, seconds: float) -> dict[str, str]:
        return dict.fromkeys(self.lost, "gone")

    def roles_of_pools(self) -> dict[str, list[str]]:
        return self.pools

    def pools_by_processes(self) -> list[list[str]]:
        return [[pool] for pool in self.pools]

    def restart(self, pool: str) -> None:
        self.calls.append(f"restart {pool}")

    def construct_again(self, pool: str) -> None:
        self.calls.append(f"construct {pool}")


class Unstartable(Groups):
    """Its node is full."""

    def restart(self, pool: str) -> None:
        raise PlacementError("no room")


class AtOnce:
    """Stand-in for a run's restarts: there is always room."""

    def wait_for_capacity(self, start: Callable[[], None], since: float) -> None:
        start()


def restarted(groups: Any) -> bool:
    return restart_groups(groups, ROLLOUT, AtOnce(), 0.0, 60.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("groups", "calls"),
    [
        (Groups(["actor"]), ["restart actor", "construct critic"]),
        (Groups(["actor", "critic"]), ["restart actor", "restart critic"]),
        (Groups(["rollout"]), ["restart rollout", "construct actor", "construct critic"]),
        (
            Groups(["critic"], train=["actor", "rollout"], critic=["critic"]),
            ["restart critic", "restart train"],
        ),
    ],
    ids=["actor", "actor and critic", "rollout", "critic, with a rollout in the actor's process"],
)
def test_a_lost_group_restarts_or_constructs_roles_with_state(
    groups: Groups, calls: list[str]
) -> None:
    assert restarted(groups)
    assert groups.calls == calls


@pytest.mark.parametrize(
    "groups",
    [Groups([]), Groups(["actor", "critic", "rollout"]), Unstartable(["actor"])],
    ids=["nothing is lost", "all are lost", "the lost group cannot start"],
)
def test_no_group_is_kept_in_other_cases(groups: Groups) -> None:
    assert not restarted(groups)
