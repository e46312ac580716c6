"""A generator whose node is lost waits for another node and is restarted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.runs import overrides
from trainer import load_config, lost_groups
from trainer.async_training import generators
from trainer.async_training.config import AsyncConfig
from trainer.async_training.generators import Places
from trainer.async_training.recipe import ASYNC
from trainer.loop import Loop, StopRequested
from trainer.run_folder.signals import RunInterrupted
from verl_like.errors import (
    InsufficientResourcesError,
    PlacementError,
    RolloutError,
    WorkerDiedError,
)

LOST = WorkerDiedError("node 7 is lost")


class Group:
    """The group of a generator whose node is lost; then that of its successor."""

    def __init__(self, started: list[str], role: str) -> None:
        self.started, self.role = started, role

    def ping(self) -> None:
        raise LOST

    def init_model(self) -> None:
        self.started.append(self.role)


class Cluster(dict[str, Group]):
    """Groups of generators; a pool can be restarted at the first try without an error."""

    def check_idle(self, what: str) -> None:
        """Lose only the pools that a try names."""

    def __init__(self, generators: int, *errors: Exception) -> None:
        self.errors, self.started = list(errors), list[str]()
        roles = ["rollout", *(f"rollout_{number}" for number in range(1, generators))]
        super().__init__({role: Group(self.started, role) for role in roles})

    def restart(self, pool: str) -> None:
        if self.errors:
            raise self.errors.pop(0)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generators, "LOOK_AGAIN_S", 0.001)
    monkeypatch.setattr(lost_groups, "FIRST_MESSAGE_S", 0.0)


def config_of(tiny: Path, folder: Path, *more: str) -> AsyncConfig:
    settings = ("trainer.backend=local", "async_training.on_generator_failure=restart", *more)
    return load_config(overrides(tiny, folder, *settings), ASYNC)


class Queue:
    """An open queue whose version comes from a function."""

    is_closed = False

    def join(self, generator: int) -> None:
        """Generators are not counted."""

    def __init__(self, version: Callable[[], int]) -> None:
        self._version = version

    @property
    def version(self) -> int:
        return self._version()


def losses(
    config: AsyncConfig,
    cluster: Cluster,
    is_ending: bool = False,
    version: Callable[[], int] = lambda: 7,
) -> Places:
    stop = SimpleNamespace(received=is_ending)
    run: Any = SimpleNamespace(config=config, groups=cluster, stop=stop)
    buffer: Any = Queue(version)
    return Places(run, buffer, lambda role: {})


def no_room(times: int) -> list[Exception]:
    return [InsufficientResourcesError("no living node has room for generator_0_pool.")] * times


def test_a_lost_generator_restarts_when_a_node_has_room(
    tiny_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = Cluster(1, *no_room(3))
    config = config_of(tiny_dir, tmp_path)
    assert losses(config, cluster).on_loss(0, LOST, num_lost=2) is True
    assert cluster.started == ["rollout"]
    assert (
        "generator 0: waiting for a node (no living node has room for generator_0_pool) for"
        in caplog.text
    )


def test_a_failing_start_is_tried_three_times(tiny_dir: Path, tmp_path: Path) -> None:
    config, died = config_of(tiny_dir, tmp_path), WorkerDiedError("start of rollout")
    assert losses(config, Cluster(1, died, died)).on_loss(0, LOST, num_lost=2) is True
    words = r"start of rollout It was restarted 3 times at version 7 of the weights, the maximum\."
    with pytest.raises(RolloutError, match=words):
        losses(config, Cluster(1, died, died, died)).on_loss(0, LOST, num_lost=2)


def test_losses_with_progress_between_them_do_not_add_up(tiny_dir: Path, tmp_path: Path) -> None:
    version = itertools.count().__next__
    lost = losses(config_of(tiny_dir, tmp_path), Cluster(1), version=version)
    assert [lost.on_loss(0, LOST, num_lost=2) for _ in range(5)] == [True] * 5


def test_a_loss_is_raised_where_all_pools_must_move(tiny_dir: Path, tmp_path: Path) -> None:
    cluster = Cluster(1, PlacementError("A new placement of all pools would fit."))
    with pytest.raises(WorkerDiedError, match="node 7 is lost") as caught:
        losses(config_of(tiny_dir, tmp_path), cluster).on_loss(0, LOST, num_lost=2)
    assert caught.value.__notes__ == ["A new placement of all pools would fit."]


def test_a_generator_that_restarts_when_the_run_ends_says_nothing(
    tiny_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    places = losses(config_of(tiny_dir, tmp_path), Cluster(1))
    ended = WorkerDiedError("init_model: the group was shut down. Call it before shutdown()")

    def place(generator: int) -> bool:
        places._buffer.is_closed = True
        raise ended

    places.place = place
    assert places.on_loss(0, LOST, num_lost=2) is False
    assert "node 7 is lost" in caplog.text
    assert "shutdown()" not in caplog.text


def test_a_stopping_run_waits_for_no_node(tiny_dir: Path, tmp_path: Path) -> None:
    two = config_of(tiny_dir, tmp_path, "async_training.generators=2")
    stopping = losses(two, Cluster(2, *no_room(3)), is_ending=True)
    assert stopping.on_loss(1, LOST, num_lost=2) is False
    with pytest.raises(StopRequested):
        stopping.on_loss(0, LOST, num_lost=2)


def test_a_waiting_run_that_is_stopped_saves_its_last_step() -> None:
    saved: list[int] = []

    class Stopping(Loop):
        def __init__(self) -> None:
            run = SimpleNamespace(step=3, groups=Cluster(0))
            self.trainer: Any = SimpleNamespace(can_save=True, run=run)

        def _step(self) -> dict[str, float]:
            raise StopRequested("a node")

        def _stop_here(self) -> None:
            saved.append(self.trainer.run.step)
            raise RunInterrupted(15, "after step 3")

    with pytest.raises(RunInterrupted, match="after step 3"):
        Stopping()._next_step(None, None)  # type: ignore[arg-type]
    assert saved == [3]
