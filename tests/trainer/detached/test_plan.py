"""What a detached run will do, in words, before it is started."""

from __future__ import annotations

import pytest

from trainer.detached.config import DetachedConfig
from trainer.detached.overlap import Phases, simulate
from trainer.detached.plan import plan_lines, prediction_lines, setup_of
from trainer.detached.recipe import DETACHED
from trainer.ppo.recipe import load_config

NEEDED = (
    "data.train_files=x",
    "actor_rollout_ref.model.path=y",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
    "algorithm.adv_estimator=grpo",
)


def config_of(*overrides: str) -> DetachedConfig:
    return load_config([*NEEDED, *overrides], DETACHED)


def test_it_says_pieces_ages_and_what_may_be_open() -> None:
    lines = plan_lines(config_of("detached.makers=2", "detached.max_staleness=2"))
    pieces = "a batch of 8 prompts is 2 pieces: 4 prompts each, which one maker answers in a call"
    assert pieces in lines
    assert any("at most 2 versions old when it is trained on" in line for line in lines)
    assert "at most 96 samples are queued or being made (3 times a batch)" in lines
    assert any("after every batch; a maker takes it between two pieces" in line for line in lines)
    assert any("corrected for: rollout_is=token" in line for line in lines)
    assert lines[1].split()[:3] == ["maker", "0", "rollout"]


def test_a_smaller_limit_is_what_may_be_open() -> None:
    lines = plan_lines(config_of("detached.limit=40", "detached.update_steps=3"))
    assert "at most 40 samples are queued or being made (1.25 times a batch)" in lines
    assert any("after every 3 batches" in line for line in lines)


@pytest.mark.parametrize(("makers", "idle"), [(2, 0), (4, 2)])
def test_makers_without_a_piece_are_told(makers: int, idle: int) -> None:
    sizes = ["detached.max_staleness=0", "detached.prompts_per_piece=4"]
    lines = plan_lines(config_of(f"detached.makers={makers}", *sizes))
    told = [line for line in lines if "have nothing to make" in line]
    assert [line.split()[0] for line in told] == ([str(idle)] if idle else [])


def test_the_prediction_is_that_of_the_simulation() -> None:
    config = config_of("detached.makers=2", "detached.prompts_per_piece=2", "detached.limit=48")
    setup = setup_of(config)
    assert (setup.num_makers, setup.max_staleness, setup.pieces, setup.limit) == (2, 1, 4, 6)
    phases = Phases([2.0], [0.1], [0.4], [0.05])
    (line,) = prediction_lines(config, phases)
    assert line.startswith(f"{simulate(phases, setup).seconds:.3g} s a step; busy: maker 0 ")
    assert line.endswith("limited by: makers")
