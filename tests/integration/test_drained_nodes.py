"""A run whose nodes Ray drains moves to other nodes after the step, and loses nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.drained_nodes import DRAINED, PPO_POOLS, SHORT, STEPS
from tests.integration.runs import numbers, overrides
from tests.programs import found_by
from trainer import load_config, run

pytestmark = [pytest.mark.ray, pytest.mark.long]


@pytest.fixture(scope="module")
def drained(
    tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path, forked_python: Path
) -> dict[str, Any]:
    """The output of `drained_nodes.py`, in a separate process."""
    folder = tmp_path_factory.mktemp("drained") / "runs"
    report = found_by(
        forked_python, "tests.integration.drained_nodes", tiny_dir, folder, limit_s=600
    )
    return {"folder": folder / "run", **report}


def test_notices_in_every_stage_lose_no_step_and_keep_the_numbers(
    drained: dict[str, Any], tiny_dir: Path, tmp_path: Path
) -> None:
    assert len(drained["nodes"]) == STEPS  # no step was repeated
    more = ("trainer.backend=local", "trainer.n_gpus_per_node=2", *PPO_POOLS, *SHORT)
    run(load_config(overrides(tiny_dir, tmp_path, *more, f"trainer.total_training_steps={STEPS}")))
    assert numbers(drained["folder"]) == numbers(tmp_path)


def test_only_the_pools_on_drained_nodes_move_and_the_nodes_can_go(
    drained: dict[str, Any],
) -> None:
    nodes = drained["nodes"]
    for step, (_, pools) in DRAINED.items():
        before, after = nodes[step - 1], nodes[step]
        assert {pool for pool in before if before[pool] != after[pool]} == set(pools)
    assert drained["still_there"] == []
    # a rollout has no state: the others keep their processes
    before, after = drained["pids"][5:7]
    assert [role for role in before if before[role] != after[role]] == ["rollout"]


def test_the_summary_names_the_moves(drained: dict[str, Any]) -> None:
    page = (drained["folder"] / "report.html").read_text(encoding="utf-8")
    assert "moved from drained nodes: after step 1, 2, 3, 4, 5" in page
    assert "rollout_pool moved in" in drained["log"]
