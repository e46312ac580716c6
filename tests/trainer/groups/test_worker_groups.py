"""The groups of a run: pools start side by side, and nothing outlives an interrupted start."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.integration.runs import overrides
from trainer import load_config
from trainer.groups.worker_groups import WorkerGroups, side_by_side, worker_class
from verl_like.backends.local.group import LocalWorkerGroup


def test_starts_meet_and_the_first_error_carries_the_others() -> None:
    meeting = threading.Barrier(3, timeout=20)

    def start(number: int) -> None:
        meeting.wait()
        if number:
            raise ValueError(f"pool {number} is broken")

    with pytest.raises(ValueError, match="pool 1 is broken") as caught:
        side_by_side([lambda number=number: start(number) for number in range(3)])
    assert caught.value.__notes__ == ["another start failed, too: ValueError: pool 2 is broken"]


def test_a_pool_that_comes_up_after_the_end_is_ended(
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
        groups._start(plan, {"actor": worker_class(config, "actor")})
        assert len(ended) == 2
