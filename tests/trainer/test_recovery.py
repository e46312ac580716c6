"""The loss of a worker ends only its own group, and the run recovers undisturbed numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import calls, lines, numbers, overrides
from tests.trainer.killing import SHORT, Killed, Kills, differing, killed
from trainer import load_config, run
from trainer.ppo.config import PPOConfig
from trainer.ppo.recipe import PPO
from workers.weights import sync

POOLS = (
    "resource_pool_spec={train_pool: [1], rollout_pool: [1], ref_pool: [1]}",
    "role_mapping={actor: train_pool, critic: train_pool, rollout: rollout_pool, ref: ref_pool}",
    *("trainer.n_gpus_per_node=3", "trainer.device=cpu"),
)
TWO_ROLLOUTS = (
    "resource_pool_spec={train_pool: [1], rollout_pool: [2], ref_pool: [1]}",
    "trainer.n_gpus_per_node=4",
)
SAVED = ("trainer.save_freq=1",)


@dataclass(kw_only=True)
class ChildConfig(PPOConfig):
    """Rollout and trained roles have separate processes, as on Ray; the reference has none."""

    @property
    def child_pools(self) -> frozenset[str]:
        return frozenset({"rollout_pool", "train_pool"})


CHILD = replace(PPO, schema=ChildConfig)


@pytest.fixture(scope="module")
def whole(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of an undisturbed run in one process."""
    folder = tmp_path_factory.mktemp("whole")
    run(load_config(overrides(tiny_dir, folder, "trainer.backend=local", *POOLS, *SHORT)))
    return folder


@pytest.fixture(scope="module")
def disturbed(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """A rank of the rollout is lost when it is idle, when it generates, and when another call is
    late; then the actor is.
    """
    kills: Kills = {(1, "update"): ("rollout",), (2, "begin"): ("rollout",)}
    kills |= {(2, "update"): ("rollout",), (3, "score"): ("actor",)}
    folder = tmp_path_factory.mktemp("killed")
    more = ("trainer.backend=local", "trainer.max_restarts=4", *TWO_ROLLOUTS)
    return killed(tiny_dir, folder, CHILD, kills, *POOLS, *SAVED, *more, late=(2, "update"))


def test_numbers_are_those_of_an_undisturbed_run(disturbed: Killed, whole: Path) -> None:
    assert numbers(disturbed.folder) == numbers(whole)


def test_a_rollout_lost_in_an_update_is_replaced(disturbed: Killed) -> None:
    first, second, *_ = disturbed.pids
    assert differing(first, second) == ["rollout"]
    assert re.search(r"\(rollout_pool\) restarted after \d+\.\d s; step 1 continues", disturbed.log)


def test_only_lost_samples_are_generated_again(disturbed: Killed) -> None:
    _, before, after, *_ = disturbed.pids
    assert differing(before, after) == ["rollout"]
    assert disturbed.log.count("are kept") == 1
    assert "step 2: 4 samples of the lost group are kept, 4 are regenerated." in disturbed.log
    record = lines(disturbed.folder, "restarts.jsonl")
    lost, samples, _, state = [line for line in record if line["step"] == 2]
    assert "rank 1 of 2" in lost["lost"]
    assert (state["state_from"], state["finished_steps_made_again"]) == ("global_step_1", 0)
    assert (samples["samples_kept"], samples["samples_made_again"]) == (4, 4)

    made = [event["args"] for event in calls(disturbed.folder, "generate_sequences")]
    in_steps = [args["step"] for args in made]
    assert in_steps.count(1) == 2
    assert in_steps.count(2) == 3 + 2, "rank 0, which lives, and the next group's; then again all"


def test_a_late_call_falls_back_to_the_checkpoint(disturbed: Killed) -> None:
    _, _, again, after, *_ = disturbed.pids
    assert differing(again, after) == []
    assert "resumes after step 1 from global_step_1; no finished" in disturbed.log


def test_a_lost_actor_takes_all_back_and_the_other_processes_stay(disturbed: Killed) -> None:
    assert len(disturbed.pids) == 5, "steps 1, 2, 2, 3, 3"
    assert differing(*disturbed.pids[3:]) == ["actor", "critic"]
    assert "resumes after step 2 from global_step_2; no finished" in disturbed.log


def test_after_two_refusals_of_the_same_weights_their_step_is_made_again(
    tiny_dir: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, left = sync._transfer, [3, 3]

    def with_a_bucket_less(actor: Any, rollout: Any, version: int, *rest: Any) -> list[Any]:
        if version in left:  # that of the second step: the first is that of the models
            left.remove(version)
            actor.drop_next_bucket()
        return own(actor, rollout, version, *rest)

    monkeypatch.setattr(sync, "_transfer", with_a_bucket_less)
    settings = *POOLS, "trainer.backend=local", "trainer.save_freq=1"
    found = killed(tiny_dir, tmp_path, CHILD, {}, *settings)
    assert not left
    lost, state = lines(tmp_path, "restarts.jsonl")
    assert "version 3 was not applied: rollout rank 0" in lost["lost"]
    assert (lost["step"], state["state_from"]) == (2, "global_step_1")
    assert "Restart 1 of 3" in found.log
    assert numbers(tmp_path) == numbers(whole)


@pytest.mark.ray
def test_on_ray_the_same_holds(
    tiny_dir: Path, whole: Path, tmp_path: Path, ray_session: None
) -> None:
    kills: Kills = {(1, "begin"): ("rollout",), (2, "score"): ("ref",), (3, "begin"): ("actor",)}
    backend = "trainer.backend=ray", "cpus_per_process=0.4"
    settings = *POOLS, *SAVED, *backend, *TWO_ROLLOUTS
    found = killed(tiny_dir, tmp_path, PPO, kills, *settings)
    assert numbers(tmp_path) == numbers(whole)
    first, second, failed, last = found.pids
    assert differing(first, second) == ["rollout"]
    assert "step 1: 4 samples of the lost group are kept, 4 are regenerated." in found.log
    assert differing(second, failed) == ["ref"]
    assert "group ref (ref_pool) restarted after" in found.log
    generated = [event["args"]["step"] for event in calls(tmp_path, "generate_sequences")]
    assert generated.count(2) == 2, "samples stay when the reference is lost"
    assert differing(failed, last) == ["actor", "critic"]
