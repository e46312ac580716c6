"""The groups of a run: pools start concurrently, and nothing outlives an interrupted start."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.integration.runs import overrides
from tests.trainer.groups.reporting_role import reporting
from trainer import load_config
from trainer.groups.worker_groups import WorkerGroups, side_by_side
from verl_like.backends.local import LocalWorkerGroup


def test_pools_start_concurrently_and_the_first_error_lists_the_others() -> None:
    all_started = threading.Barrier(3, timeout=20)

    def start(number: int) -> None:
        all_started.wait()
        if number:
            raise ValueError(f"pool {number} is broken")

    with pytest.raises(ValueError, match="pool 1 is broken") as caught:
        side_by_side([lambda number=number: start(number) for number in range(3)])
    assert caught.value.__notes__ == ["another start failed, too: ValueError: pool 2 is broken"]


def test_a_pool_that_starts_after_the_end_is_shut_down(
    tiny_dir: Path, tmp_path: Path, monkeypatch
) -> None:
    config = load_config(
        overrides(tiny_dir, tmp_path, "trainer.backend=local", "placement=colocate")
    )
    ended: list[LocalWorkerGroup] = []
    end = LocalWorkerGroup.shutdown
    monkeypatch.setattr(
        LocalWorkerGroup, "shutdown", lambda group: ended.append(group) or end(group)
    )
    with WorkerGroups(config) as groups:
        (plan,) = groups.placement.pools.values()
        assert ended == []
        groups.shutdown()
        groups._start(plan)
        assert len(ended) == 2


def test_a_pool_next_to_the_driver_is_a_child_with_its_own_config(
    tmp_path: Path,
) -> None:
    roles = {
        "rollout": "generator_0_pool",
        "rollout_1": "generator_1_pool",
        "actor": "trainer_pool",
    }
    config = reporting(tmp_path, roles, generator_0_pool=1, generator_1_pool=1, trainer_pool=1)
    with WorkerGroups(config) as groups:
        pids = {role: groups[role].who()[0][1] for role in groups}
        assert pids["actor"] == os.getpid()
        assert len(set(pids.values())) == 3
        assert not groups["rollout"].shares_processes_with(groups["actor"])
        assert groups["rollout"].neighbors() == [["rollout"]]
        assert groups["actor"].neighbors() == [["actor"]]
        experiments = {role: groups[role].experiment() for role in groups}
        assert experiments == {role: [f"run of {role}"] for role in roles}

        sleeping = groups["rollout"].sleep.remote(1.0)
        assert not sleeping.done()
        assert groups["rollout"].interrupt(7) == [7], "the driver can call another method"
        assert not sleeping.done()
        sleeping.get()


class Idle(SimpleNamespace):
    """A transport that records the waits during which it was idle."""

    def check_idle(self, what: str) -> None:
        self.checked = what


def test_pools_watch_each_other_except_those_next_to_the_driver() -> None:
    groups = WorkerGroups.__new__(WorkerGroups)
    groups.config = SimpleNamespace(child_pools=frozenset({"generator_pool"}))
    pools = {"actor_pool": 1, "ref_pool": 1, "critic_pool": 2, "generator_pool": 3}
    groups._fused = {
        name: SimpleNamespace(transport=Idle(process_key=key, companions=[]))
        for name, key in pools.items()
    }
    groups._watch_each_other()
    transports = {name: group.transport for name, group in groups._fused.items()}
    assert transports["critic_pool"].companions == [transports["ref_pool"]]
    assert transports["ref_pool"].companions == [transports["critic_pool"]]
    assert transports["generator_pool"].companions == []
    groups.check_idle("rewards")
    checked = [name for name, transport in transports.items() if hasattr(transport, "checked")]
    assert checked == ["ref_pool", "critic_pool"], "one pool per process"
