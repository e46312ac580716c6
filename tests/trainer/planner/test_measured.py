"""A run's own speed in the plan that is made from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.forked import run_program
from tests.integration.runs import overrides
from trainer.cli import main, plan
from trainer.planner.measured import MeasuredRun, predicted_seconds
from trainer.planner.ppo import PPOJob
from verl_like.errors import ConfigError


def planned(*arguments: str) -> PPOJob:
    job = plan.job_of(["plan.gpus=1", "plan.device=H100", *arguments])
    assert isinstance(job, PPOJob)
    return job


def test_a_slower_call_is_slower_in_every_placement(tiny_dir: Path, tmp_path: Path) -> None:
    settings = [s for s in overrides(tiny_dir, tmp_path) if not s.startswith("trainer.")]
    job = planned(*settings)
    ranks = dict.fromkeys(job.roles, 1)
    seconds = predicted_seconds(job, ranks)
    slower = seconds | {("actor", "update_actor"): 3 * seconds["actor", "update_actor"]}
    factors = MeasuredRun(Path(), slower, ranks, 0.0, 8.0, 8.0).factors(job)
    assert factors["actor", "update_actor"] == pytest.approx(3)
    assert factors["critic", "update_critic"] == pytest.approx(1)
    plain, corrected = (
        each.layouts("actor", 1)[0].seconds for each in (job, replace(job, factors=factors))
    )
    assert corrected[2] == pytest.approx(3 * plain[2], rel=0.05)
    assert corrected[1] == pytest.approx(plain[1])


@pytest.fixture(scope="module")
def run(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of three steps of PPO."""
    folder = tmp_path_factory.mktemp("measured")
    where = ("trainer.backend=local", "trainer.device=cpu", "trainer.total_training_steps=3")
    settings = [
        each
        for each in overrides(tiny_dir, folder / "run")
        if not each.startswith("trainer.total_training_steps")
    ]
    done = run_program(main.main, "ppo", *settings, *where, folder=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def test_a_plan_from_a_run_takes_its_settings_lengths_and_seconds(run: Path) -> None:
    measured = MeasuredRun.of(run)
    job = planned(f"plan.from_run={run}")
    assert job.config.algorithm.adv_estimator == "gae"
    assert job.rows("actor").mean_response == pytest.approx(measured.response, rel=0.02)
    best = plan.plan(["plan.gpus=1", "plan.device=H100", f"plan.from_run={run}"])
    assert "Seconds are corrected by the run" in best
    together = predicted_seconds(replace(job, factors={}), measured.ranks)
    corrected = {call: together[call] * job.factors[call] for call in job.factors}
    assert corrected == pytest.approx({call: measured.seconds[call] for call in corrected})


def test_lengths_of_a_file_stand_for_a_mean(tmp_path: Path) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(json.dumps([10] * 900 + [500] * 100))
    found = plan.read_lengths(str(file))
    assert sum(found) / len(found) == pytest.approx(59, rel=0.1)
    assert found[-1] == 500


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "give a list of lengths in tokens, above 0"),
        ("[3, 0]", "above 0"),
        ("{", "is no JSON list"),
        ("[3, 4000]", "has a response of 4,000 tokens, above data.max_response_length=512"),
    ],
)
def test_lengths_that_contradict_are_refused(
    tiny_dir: Path, tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(text)
    asked = ["plan.gpus=1", "plan.device=H100", f"plan.lengths={file}"]
    with pytest.raises(ConfigError, match=words):
        plan.plan([*asked, f"actor_rollout_ref.model.path={tiny_dir}/model"])


def test_a_run_of_one_step_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "timing_s/step": 2.0}) + "\n")
    with pytest.raises(ConfigError, match="has no step after its first one"):
        MeasuredRun.of(tmp_path)
