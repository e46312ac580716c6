"""One pool is lost and restarted while the others continue."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.groups.reporting_role import reporting
from tests.waiting import wait_until_ended
from trainer.groups.worker_groups import WorkerGroups
from verl_like.errors import PlacementError, WorkerDiedError

ROLES = {"rollout": "generator_0_pool", "rollout_1": "generator_1_pool", "actor": "trainer_pool"}
BACKENDS = ["local", pytest.param("ray", marks=pytest.mark.ray)]


@pytest.fixture(scope="module", params=BACKENDS)
def groups(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerGroups]:
    """Two generators, the second with two processes, and a trainer; a test leaves all alive."""
    if request.param == "ray":
        request.getfixturevalue("ray_session")
    folder = tmp_path_factory.mktemp("run")
    config = reporting(
        folder, ROLES, request.param, generator_0_pool=1, generator_1_pool=2, trainer_pool=1
    )
    with WorkerGroups(config) as started:
        yield started


def pids(groups: WorkerGroups, role: str) -> list[int]:
    return [pid for _, pid in groups[role].who()]


def test_a_killed_generator_is_noticed_at_once_and_restarted(groups: WorkerGroups) -> None:
    before = {role: pids(groups, role) for role in ROLES}
    lost_group = groups["rollout"]
    sleeping = lost_group.sleep.remote(60.0)
    time.sleep(0.3)
    killed_at = time.monotonic()
    os.kill(before["rollout"][0], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rollout.sleep, rollout rank 0 of 1"):
        sleeping.get()
    assert time.monotonic() - killed_at < 20

    groups.restart("generator_0_pool")
    assert groups["rollout"] is not lost_group
    assert pids(groups, "rollout")[0] not in before["rollout"]
    assert pids(groups, "rollout_1") == before["rollout_1"]
    assert pids(groups, "actor") == before["actor"]
    with pytest.raises(WorkerDiedError):
        lost_group.who()


def test_a_restart_ends_the_processes_of_a_living_pool(groups: WorkerGroups) -> None:
    groups.take_calls()
    before, waiting = pids(groups, "rollout_1"), groups["rollout_1"].sleep.remote(60.0)
    groups.restart("generator_1_pool")
    with pytest.raises(WorkerDiedError):
        waiting.get()
    after = pids(groups, "rollout_1")
    assert len(set(before + after)) == 4
    calls = {call["pid"] for call in groups.take_calls() if call["method"] == "who"}
    assert calls == {*before, *after}, "the timeline has calls of the ended processes, too"
    wait_until_ended(*before)  # Ray ends its workers a moment after they are killed


def test_the_loss_of_one_rank_is_reported_before_the_others_finish(groups: WorkerGroups) -> None:
    sleeping = groups["rollout_1"].sleep.remote(60.0)
    killed_at = time.monotonic()
    os.kill(pids_of_transport(groups, "rollout_1")[1], signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match="rollout_1.sleep, rollout_1 rank 1 of 2") as caught:
        sleeping.get()
    assert time.monotonic() - killed_at < 20
    assert "not finished 1 s after the failure: rollout_1 rank 0 of 2" in caught.value.__notes__[0]
    groups.restart("generator_1_pool")


def pids_of_transport(groups: WorkerGroups, role: str) -> list[int]:
    """Return the pids without a call, because the processes are busy."""
    return [header.pid for header in groups[role].transport.started]


def test_lost_and_unresponsive_pools_are_named(groups: WorkerGroups) -> None:
    os.kill(pids(groups, "rollout")[0], signal.SIGKILL)
    sleeping, started_at = groups["rollout_1"].sleep.remote(60.0), time.monotonic()
    lost = groups.lost_pools(2.0)
    assert list(lost) == ["generator_0_pool", "generator_1_pool"]
    assert "did not finish within" in lost["generator_1_pool"]
    assert time.monotonic() - started_at < 30
    for pool in lost:
        groups.restart(pool)
    with pytest.raises(WorkerDiedError):
        sleeping.get()
    assert groups.lost_pools(10.0) == {}


def test_roles_are_constructed_again_in_their_processes(groups: WorkerGroups) -> None:
    group, before = groups["rollout_1"], pids(groups, "rollout_1")
    groups.construct_again("generator_1_pool")
    assert group.times_closed() == [1, 1]
    first = [group.execute_func_rank_zero(random.random) for _ in range(2)]
    assert group.sum_of_ranks() == [1.0, 1.0]

    groups.take_new_roles()
    groups.construct_again("generator_1_pool")
    assert groups.take_new_roles() == {"rollout_1"}
    again = [group.execute_func_rank_zero(random.random) for _ in range(2)]
    assert again == first, "the role's random state is that of its beginning"
    assert group.sum_of_ranks() == [1.0, 1.0], "their process group is still open"
    assert pids(groups, "rollout_1") == before


def test_a_pool_in_the_driver_s_process_is_not_restarted(tmp_path: Path) -> None:
    config = reporting(tmp_path, {"actor": "trainer_pool"}, trainer_pool=1)
    with WorkerGroups(config) as groups:
        with pytest.raises(PlacementError, match="'trainer_pool' .* the driver's own"):
            groups.restart("trainer_pool")
        with pytest.raises(PlacementError, match="no pool 'trainer_pol' to restart. Did you mean"):
            groups.restart("trainer_pol")
        assert groups["actor"].who() == [("actor", os.getpid())]


def test_a_restart_after_the_end_leaves_no_process(tmp_path: Path) -> None:
    config = reporting(tmp_path, {"rollout": "generator_0_pool"}, generator_0_pool=1)
    with WorkerGroups(config) as groups:
        groups.shutdown()
        before = groups["rollout"]
        groups.restart("generator_0_pool")
        assert groups["rollout"] is before
        with pytest.raises(WorkerDiedError):
            before.who()
