"""A run that loses a node continues, waits for another node, or ends with an error."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.integration.lost_nodes import PLACEMENT_S, PPO_POOLS, SHORT, STEPS
from tests.integration.runs import numbers, overrides
from tests.programs import found_by
from tests.trainer.recipes.regression import REGRESSION
from trainer import load_config, run

pytestmark = [pytest.mark.ray, pytest.mark.long]


@pytest.fixture(scope="module")
def lost(
    tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path, forked_python: Path
) -> dict[str, Any]:
    """The output of `lost_nodes.py`, in a separate process."""
    folder = tmp_path_factory.mktemp("lost") / "runs"
    report = found_by(forked_python, "tests.integration.lost_nodes", tiny_dir, folder, limit_s=600)
    return {"folder": folder, **report}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run of `lost_nodes.LosesRole`."""
    folder = tmp_path_factory.mktemp("undisturbed")
    settings = ("trainer.backend=local", "trainer.logger=[]", f"trainer.default_local_dir={folder}")
    run(load_config([*settings, f"trainer.total_training_steps={STEPS}"], REGRESSION))
    return folder


def test_a_step_runs_on_two_nodes_of_an_existing_cluster(lost: dict[str, Any]) -> None:
    folder = lost["folder"] / "two_nodes" / "first"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_pool_runs_on_the_node_with_its_label(lost: dict[str, Any]) -> None:
    report = lost["two_nodes"]
    assert report["critic_on"] == report["nodes"][2]  # the third node is rack r2


def test_a_user_s_module_is_shipped_to_the_node_that_imports_it(lost: dict[str, Any]) -> None:
    assert lost["two_nodes"]["came_from"].endswith("/my_critic.py")
    assert not lost["two_nodes"]["came_from"].startswith(lost["two_nodes"]["code"])


def test_a_node_lost_during_a_step_is_named_within_15_seconds(lost: dict[str, Any]) -> None:
    assert lost["two_nodes"]["seconds"] < 15
    assert re.match(
        r"WorkerDiedError: critic.update_critic, critic rank 0 of 1 \(pid \d+ on [\d.]+.*is gone",
        lost["two_nodes"]["error"],
    )


def test_a_rollout_moves_from_a_lost_node_to_a_spare_one_with_the_same_numbers(
    lost: dict[str, Any], tiny_dir: Path, tmp_path: Path
) -> None:
    first, last = lost["spare"]["pids"][0], lost["spare"]["pids"][-1]
    assert [role for role in first if first[role] != last[role]] == ["rollout"]
    before, _, after = lost["spare"]["nodes"]
    assert before != after
    assert f"pool rollout_pool lost a node and moved to {after}" in lost["log"]
    local = ("trainer.backend=local", "trainer.n_gpus_per_node=2", *PPO_POOLS, *SHORT)
    run(load_config(overrides(tiny_dir, tmp_path, *local)))
    assert numbers(lost["folder"] / "spare") == numbers(tmp_path)


def test_without_a_spare_node_the_run_waits_and_keeps_its_other_roles(
    lost: dict[str, Any], undisturbed: Path
) -> None:
    assert "the restart: waiting for a node (lost node(s) " in lost["log"]
    first, last = lost["again"]["pids"][0], lost["again"]["pids"][-1]
    assert [role for role in first if first[role] != last[role]] == ["teacher"]
    assert numbers(lost["folder"] / "again") == numbers(undisturbed)


def test_a_run_that_gets_no_node_names_the_lost_node_and_its_pool(
    lost: dict[str, Any], undisturbed: Path
) -> None:
    report = lost["none"]
    assert re.search(
        r"lost node\(s\) \S+ \(\w{8}\): pool 'student_pool' needs 1 node\(s\).* has room .*: "
        rf".* After \d+ s without another node \(timeouts\.placement_s={PLACEMENT_S:g}\)",
        report["error"],
    )
    assert report["seconds"] < 60
    folder = lost["folder"] / "none"
    assert "timeouts.placement_s" in (folder / "report.html").read_text(encoding="utf-8")
    assert numbers(folder) == numbers(undisturbed)[:2]
