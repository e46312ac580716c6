"""Every wait ends: with a result, or with an error that names who, where and why."""

from __future__ import annotations

import logging
import os
import signal
import time
from pathlib import Path

import pytest

from tests.forked import run_program
from tests.verl_like.groups import start
from tests.verl_like.sample_workers import Adder, Faulty
from tests.waiting import wait_until_ended
from verl_like import ClassWithInitArgs, LocalWorkerGroup, ResourcePool, gather
from verl_like.calls import future
from verl_like.calls.deadlines import Deadlines
from verl_like.errors import WaitTimeoutError, WorkerDiedError, WorkerError

QUICK = Deadlines(start_s=180, rendezvous_s=2, call_s=60, warn_s=0.2, grace_s=2)
BACKENDS = ["child", pytest.param("ray", marks=pytest.mark.ray)]


def spawn(request: pytest.FixtureRequest, backend: str, log_dir: Path):
    if backend == "ray":
        request.getfixturevalue("ray_session")
    roles = {"faulty": (Faulty, ()), "adder": (Adder, ())}
    with start(backend, roles, [2], deadlines=QUICK, log_dir=str(log_dir)) as fused:
        yield fused.spawn(roles)


@pytest.fixture
def fresh(request: pytest.FixtureRequest, tmp_path: Path):
    yield from spawn(request, request.param, tmp_path)


@pytest.fixture(scope="module", params=BACKENDS)
def groups(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """One pair of processes for the hangs that end by themselves."""
    yield from spawn(request, request.param, tmp_path_factory.mktemp("logs"))


@pytest.mark.parametrize(
    ("fresh", "how", "cause"),
    [
        ("child", "kill", "killed by SIGKILL"),
        ("child", "exit", "exited with status 3"),
        pytest.param(
            "ray",
            "kill",
            "killed by SIGKILL .*by the kernel when memory ran out",
            marks=pytest.mark.ray,
        ),
    ],
    indirect=["fresh"],
)
def test_a_dead_worker_fails_all_its_futures(fresh, tmp_path: Path, how: str, cause: str) -> None:
    began = time.monotonic()
    dying, queued = fresh["faulty"].dies(how), fresh["adder"].pid.remote()
    with pytest.raises(
        WorkerDiedError, match=rf"(?s)faulty.dies, faulty rank 1 of 2 .*faulty-1.log.*{cause}"
    ) as caught:
        gather(dying, queued)
    assert time.monotonic() - began < 15
    notes = "".join(caught.value.__notes__)
    assert "WorkerDiedError: adder.pid, adder rank 1 of 2" in notes
    assert f"{tmp_path}/adder-1.log" in notes


@pytest.mark.parametrize("fresh", BACKENDS, indirect=True)
def test_a_failed_rendezvous_names_the_missing_rank(fresh) -> None:
    with pytest.raises(
        WorkerError, match=r"faulty rank 0 of 2 waited 2 s \(timeouts.rendezvous_s\) .* for rank 1"
    ):
        fresh["faulty"].meets_alone()


def test_a_future_can_be_read_after_a_timeout(groups) -> None:
    future = groups["faulty"].sleeps(1.0)
    with pytest.raises(WaitTimeoutError, match="still computing .or sleeping"):
        gather(future, timeout=0.3)
    assert future.get() == [0, 1]


def test_stacks_of_native_code_are_read_by_signal(groups, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(future, "STACKS_S", 0.5)
    hanging = groups["faulty"].holds_the_interpreter(3)
    time.sleep(0.3)
    with pytest.raises(WaitTimeoutError, match="(?s)read by signal.*in holds_the_interpreter"):
        hanging.get(timeout=0.2)
    hanging.get()


@pytest.mark.parametrize("fresh", BACKENDS, indirect=True)
def test_ranks_in_different_collectives_are_named(fresh, caplog: pytest.LogCaptureFixture) -> None:
    fresh["adder"].allreduce()
    with caplog.at_level(logging.WARNING), pytest.raises(WaitTimeoutError) as caught:
        fresh["faulty"].different_collectives().get(timeout=2.0)
    text = str(caught.value)
    assert "faulty.different_collectives: faulty rank 0 of 2" in text
    assert (
        "the ranks are in different collectives and wait for each other: rank 0 in all_reduce"
        in text
    )
    assert "rank 1 in broadcast (different_collectives, sample_workers.py:" in text
    assert text.count("--- stack of") == 2
    assert any("waiting for faulty rank 0 of 2" in r.getMessage() for r in caplog.records)


def call_and_die() -> None:
    """Run a caller that prints its group's processes and is killed while they work."""
    group = LocalWorkerGroup(ResourcePool([2]), ClassWithInitArgs(Faulty))
    group.sleeps(600)
    print(*[child.process.pid for child in group.transport.children], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_end_when_their_driver_is_killed(tmp_path: Path) -> None:
    done = run_program(call_and_die, folder=tmp_path)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2, done.stderr
    wait_until_ended(*pids)
