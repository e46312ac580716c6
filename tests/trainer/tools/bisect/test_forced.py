"""`verl-like bisect A B --force`: B's step on A's samples."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.integration.runs import POLICY_ALONE, overrides
from trainer import load_config, run
from trainer.cli.bisect import bisect, text_of
from trainer.tools.bisect.sides import open_side
from verl_like.errors import ConfigError
from verl_like.record import Recorder

OTHER_SAMPLES = "trainer.seed=7"
ONE_UPDATE = "actor_rollout_ref.actor.ppo_mini_batch_size=8"


@pytest.fixture(scope="module")
def first(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return a_run(tiny_dir, tmp_path_factory.mktemp("first"))


def a_run(tiny_dir: Path, folder: Path, *settings: str) -> Path:
    common = ("trainer.backend=local", "trainer.record=all", "trainer.total_training_steps=1")
    samples = ("actor_rollout_ref.rollout.n=8", "data.max_response_length=8", ONE_UPDATE)
    run(load_config(overrides(tiny_dir, folder, *common, *POLICY_ALONE, *samples, *settings)))
    return folder


def test_a_record_has_the_gradient_of_every_weight(first: Path) -> None:
    numbers = open_side(str(first)).steps[1]
    gradients = numbers["grad_norms"]
    assert gradients.keys() <= numbers["weight_norms"].keys()
    assert math.hypot(*gradients.values()) == pytest.approx(numbers["grad_norm"], rel=1e-5)


def test_a_record_has_adam_s_moments_of_every_weight(first: Path) -> None:
    numbers = open_side(str(first)).steps[1]
    clipped = min(1.0, 1.0 / numbers["grad_norm"])
    for kind, factor in (("exp_avg_norms", 0.1), ("exp_avg_sq_norms", math.sqrt(0.001))):
        assert numbers[kind].keys() == numbers["grad_norms"].keys()
        expected = {n: factor * clipped * x for n, x in numbers["grad_norms"].items()}
        assert numbers[kind] == pytest.approx(expected, rel=1e-4)


def test_with_a_s_samples_the_second_difference_is_found(
    first: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    settings = OTHER_SAMPLES, "algorithm.norm_adv_by_std_in_grpo=false"
    other = a_run(tiny_dir, tmp_path, *settings)
    finding = bisect(str(first), str(other), force=True)
    assert finding.stage in ("prompts", "samples")
    assert finding.forced is not None
    assert finding.forced.stage == "advantages"
    assert "norm_adv_by_std_in_grpo" in str(finding.forced.causes)
    assert "B's step 1 on A's samples:" in text_of(finding, str(first), str(other))


def test_runs_that_differ_only_in_samples_are_equal_on_the_same(
    first: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    other = a_run(tiny_dir, tmp_path, OTHER_SAMPLES)
    finding = bisect(str(first), str(other), force=True)
    assert finding.verdict == "differs"
    assert finding.forced is not None
    assert finding.forced.verdict == "equal", text_of(finding.forced, "a", "b")
    assert {"advantages", "loss", "weight_norms"} <= {*finding.forced.compared}


def test_all_steps_are_forced_in_sequence(tiny_dir: Path, tmp_path: Path) -> None:
    steps = "trainer.total_training_steps=3", "actor_rollout_ref.actor.optim.lr=0.001"
    three = a_run(tiny_dir, tmp_path / "a", *steps)
    other = a_run(tiny_dir, tmp_path / "b", *steps, OTHER_SAMPLES)
    finding = bisect(str(three), str(other), force=True)
    assert finding.forced is not None
    assert finding.forced.verdict == "equal", text_of(finding.forced, "a", "b")
    assert finding.forced.steps == 4  # with the weights of the beginning
    assert "B's steps 1 to 3 on A's samples:" in text_of(finding, "a", "b")
    decays = "actor_rollout_ref.actor.optim.betas=[0.9,0.99]"
    other = a_run(tiny_dir, tmp_path / "c", *steps, OTHER_SAMPLES, decays)
    finding = bisect(str(three), str(other), force=True)
    assert finding.forced is not None
    assert (finding.forced.step, finding.forced.stage) == (1, "optimizer")
    later = "actor_rollout_ref.actor.optim.lr_scheduler_type=linear"
    other = a_run(tiny_dir, tmp_path / "d", *steps, OTHER_SAMPLES, later)
    finding = bisect(str(three), str(other), force=True)
    assert finding.forced is not None
    assert (finding.forced.step, finding.forced.stage) == (2, "learning rate")


def test_a_record_cannot_be_forced(first: Path, tmp_path: Path) -> None:
    Recorder(tmp_path, "mine").step(1, {"responses": [[1, 2]], "prompts": [[3]]})
    with pytest.raises(ConfigError, match="--force: B must be a run folder of verl-like"):
        bisect(str(first), str(tmp_path), force=True)
