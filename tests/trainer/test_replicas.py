"""A group that loses a rank while another holds the same state goes on where it stood."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import calls, lines, numbers, overrides
from tests.trainer.killing import SHORT, Killed, Kills, differing, killed
from trainer import load_config, run
from trainer.ppo.recipe import PPO

TWO_RANKS = (
    *("trainer.backend=local", "trainer.n_gpus_per_node=2", "trainer.device=cpu"),
    *("actor_rollout_ref.actor.strategy=ddp", "critic.strategy=ddp"),
)

MADE_AGAIN = "finished_steps_made_again"


@pytest.fixture(scope="module")
def whole(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    run(load_config(overrides(tiny_dir, folder, *TWO_RANKS, *SHORT)))
    return folder


@pytest.fixture(scope="module")
def disturbed(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """One rank is lost in an update, in the next attempt the other one before."""
    kills: Kills = {(2, "update"): ("actor", 1), (3, "score"): ("actor", 0)}
    folder = tmp_path_factory.mktemp("killed")
    return killed(tiny_dir, folder, PPO, kills, *TWO_RANKS)


def test_numbers_are_those_of_an_undisturbed_run(disturbed: Killed, whole: Path) -> None:
    assert numbers(disturbed.folder) == numbers(whole)


def test_a_rank_that_is_lost_before_the_update_costs_no_finished_step(disturbed: Killed) -> None:
    assert len(disturbed.pids) == 6, "steps 1, 2, 1, 2, 3, 3"
    assert differing(*disturbed.pids[4:]) == ["actor", "critic", "rollout", "ref"]
    updates = [event["args"] for event in calls(disturbed.folder, "update_actor")]
    assert [args["step"] for args in updates].count(3) == 2, "that of each rank"


def test_record_and_log_say_where_the_state_came_from(disturbed: Killed) -> None:
    record = lines(disturbed.folder, "restarts.jsonl")
    found = [[line.get(name) for name in ("step", "state_from", MADE_AGAIN)] for line in record]
    replica = "actor rank 1 and critic rank 1"
    lost = [[2, None, None], [3, None, None]]
    assert found == [lost[0], [2, "the beginning", 1], lost[1], [3, replica, 0]]
    assert f"the state comes from {replica}: no finished step is lost." in disturbed.log
    assert "the state comes from the beginning: 1 finished step made again." in disturbed.log


def test_the_files_of_the_state_are_gone(disturbed: Killed) -> None:
    assert not (disturbed.folder / "replicas").exists()
