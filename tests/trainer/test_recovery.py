"""The loss of a worker ends only its own group, and the run recovers undisturbed numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import calls, lines, numbers, overrides
from tests.trainer.disturbances import LOSSY
from tests.trainer.killing import SHORT, Kills, differing, killed
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


@pytest.mark.long
def test_a_lost_rank_ends_only_its_group_and_numbers_stay(
    tiny_dir: Path, whole: Path, tmp_path: Path
) -> None:
    """A rank of the rollout is lost when it is idle, when it generates, and when another call is
    late; then the actor is lost.
    """
    kills: Kills = {(1, "update"): ("rollout",), (2, "begin"): ("rollout",)}
    kills |= {(2, "update"): ("rollout",), (3, "score"): ("actor",)}
    more = ("trainer.backend=local", "trainer.max_restarts=4", *TWO_ROLLOUTS)
    disturbed = killed(tiny_dir, tmp_path, CHILD, kills, *POOLS, *SAVED, *more, late=(2, "update"))
    assert numbers(disturbed.folder) == numbers(whole)

    first, second, second_again, third, third_again = disturbed.pids
    assert differing(first, second) == ["rollout"]
    assert re.search(r"\(rollout_pool\) restarted after \d+\.\d s; step 1 continues", disturbed.log)

    assert differing(second, second_again) == ["rollout"]
    assert disturbed.log.count("are kept") == 1
    assert "step 2: 4 samples of the lost group are kept, 4 are regenerated." in disturbed.log
    record = lines(disturbed.folder, "restarts.jsonl")
    lost, samples, _, state = [line for line in record if line["step"] == 2]
    assert "rank 1 of 2" in lost["lost"]
    assert (state["state_from"], state["finished_steps_made_again"]) == ("global_step_1", 0)
    assert (samples["samples_kept"], samples["samples_made_again"]) == (4, 4)
    generations = calls(disturbed.folder, "generate_sequences")
    in_steps = [event["args"]["step"] for event in generations]
    assert in_steps.count(1) == 2
    assert in_steps.count(2) == 3 + 2, "rank 0, which lives, and the next group's; then again all"

    assert differing(second_again, third) == []
    assert "resumes after step 1 from global_step_1; no finished" in disturbed.log
    assert differing(third, third_again) == ["actor", "critic"]
    assert "resumes after step 2 from global_step_2; no finished" in disturbed.log


@pytest.mark.long
def test_a_step_repeats_after_its_weights_are_rejected_twice(
    tiny_dir: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer, versions = sync._transfer, [3, 3]

    def without_a_bucket(actor: Any, rollout: Any, version: int, *rest: Any) -> list[Any]:
        if version in versions:  # of step 2; version 1 has the weights of the model files
            versions.remove(version)
            actor.drop_next_bucket()
        return transfer(actor, rollout, version, *rest)

    monkeypatch.setattr(sync, "_transfer", without_a_bucket)
    repeated = killed(tiny_dir, tmp_path, CHILD, {}, *POOLS, *SAVED, LOSSY, "trainer.backend=local")
    assert not versions
    lost, state = lines(tmp_path, "restarts.jsonl")
    assert "version 3 was not applied: rollout rank 0" in lost["lost"]
    assert (lost["step"], state["state_from"]) == (2, "global_step_1")
    assert "Restart 1 of 3" in repeated.log
    assert numbers(tmp_path) == numbers(whole)


@pytest.mark.long
@pytest.mark.ray
def test_a_lost_rank_on_ray_ends_only_its_group(
    tiny_dir: Path, whole: Path, tmp_path: Path, ray_session: None
) -> None:
    kills: Kills = {(1, "begin"): ("rollout",), (2, "score"): ("ref",), (3, "begin"): ("actor",)}
    backend = "trainer.backend=ray", "cpus_per_process=0.4"
    settings = *POOLS, *SAVED, *backend, *TWO_ROLLOUTS
    disturbed = killed(tiny_dir, tmp_path, PPO, kills, *settings)
    assert numbers(tmp_path) == numbers(whole)
    first, second, failed, last = disturbed.pids
    assert differing(first, second) == ["rollout"]
    assert "step 1: 4 samples of the lost group are kept, 4 are regenerated." in disturbed.log
    assert differing(second, failed) == ["ref"]
    assert "group ref (ref_pool) restarted after" in disturbed.log
    generated = [event["args"]["step"] for event in calls(tmp_path, "generate_sequences")]
    assert generated.count(2) == 2, "samples stay when the reference is lost"
    assert differing(failed, last) == ["actor", "critic"]
