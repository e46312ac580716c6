"""Policies learn to act over several turns and to use observations; an agent is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.scripts import EXAMPLES, bash
from tests.integration.runs import lines

RUN = EXAMPLES / "agents" / "run.sh"
LIAR = '''
def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return (a + b - 19) % 39 + 20
'''
WITHOUT_HINTS = 0.4
"""A policy that ignores the hints finds the number in at most 4 of 10 trajectories."""


def train(
    example: str, folder: Path, python: Path, *settings: str, run: str = "run"
) -> tuple[str, list[dict[str, float]]]:
    """Return the script's output and steps; the run's folder is `run`."""
    where = f"trainer.default_local_dir={folder / run}"
    done = bash(RUN, example, *settings, where, RUN_DIR=folder, PYTHON=python)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, lines(folder / run)


def success(steps: list[dict[str, float]]) -> list[float]:
    return [step["critic/score/mean"] for step in steps if "critic/score/mean" in step]


@pytest.mark.long
@pytest.mark.example
def test_a_guesser_learns_to_follow_hints(tmp_path: Path, forked_python: Path) -> None:
    short = "trainer.total_training_steps=36"  # the script's 75 end at 0.8
    scores = success(train("guess", tmp_path, forked_python, short)[1])
    assert scores[0] < 0.2
    assert sum(scores[-5:]) / 5 > WITHOUT_HINTS + 0.1, scores


@pytest.mark.long
@pytest.mark.example
def test_a_caller_learns_to_answer_with_the_result_of_its_tool(
    tmp_path: Path, forked_python: Path
) -> None:
    short = "trainer.total_training_steps=11"  # of 30
    scores = success(train("calculator", tmp_path, forked_python, short)[1])
    assert scores[0] < 0.2
    assert sum(scores[-5:]) / 5 > 0.6, scores

    (tmp_path / "liar.py").write_text(LIAR)
    (lied_to,) = success(
        train(
            "calculator",
            tmp_path,
            forked_python,
            f"tools=[{tmp_path}/liar.py:add]",
            f"actor_rollout_ref.model.path={tmp_path}/run/model",
            "trainer.total_training_steps=1",
            run="lied",
        )[1]
    )
    assert lied_to < 0.4


@pytest.mark.long
@pytest.mark.example
def test_the_requests_of_an_agent_are_trained(
    tmp_path: Path, tiny_dir: Path, forked_python: Path
) -> None:
    (tmp_path / "tiny").symlink_to(tiny_dir)
    output, steps = train("agent", tmp_path, forked_python, "trainer.total_training_steps=2")
    assert "'bbb'" in output  # played without a model first
    assert "the same seed gives the same trajectory" in output
    for step in steps:
        assert step["agents/num_turns/mean"] == 2
        assert step["agents/ended/terminated"] == 1
        assert step["training/num_hash_matched_samples"] == 64
        assert step["critic/score/mean"] > 0
        assert step["actor/grad_norm"] > 0


@pytest.mark.example
@pytest.mark.slow
def test_an_agent_learns(tmp_path: Path, forked_python: Path) -> None:
    first, *_, last = train("agent", tmp_path, forked_python)[1]
    assert last["critic/score/mean"] > 4 * first["critic/score/mean"]
