"""A reward function is tried on one row before any process of a model starts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import POLICY_ALONE
from trainer import load_config, run
from trainer.async_training.recipe import ASYNC
from trainer.config.schema import Recipe
from trainer.ppo.recipe import PPO
from trainer.tools.evaluation.recipe import EVAL
from verl_like.errors import ConfigError

FUNCTIONS = """
import json, time
import numpy

def letters(text):
    return [float(letter == "a") for letter in text]

def a_list(response): return letters(response)
def nothing(response): response.count("a")
def no_score(response): return {"acc": 1.0}
async def late_list(response): return letters(response)
def one_number(responses): return float(len(responses))

def two_numbers(response): return numpy.array([0.5, 0.5])
def nan(response): return float("nan")
def fails(response): raise KeyError(response)
def hangs(response): time.sleep(60)
def slow(response): time.sleep(1); return 1.0
def of_words(response): return 1 / len(response)
def right(response, ground_truth): return {"score": float(response == ground_truth)}
def zero(response): return 0.0
def constant(response): return 0.5
def a_set(response): return {"score": 1.0, "letters": set(response)}
def letter(response): return float(ord(response[0]))
"""


TRAINED = [
    *POLICY_ALONE,
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=2",
]
Start = Callable[..., None]


class StartedError(Exception):
    """The run would now start the processes of its models."""


@pytest.fixture
def start(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Return a function that starts a recipe with one of `FUNCTIONS` as its reward."""

    def start_groups(*_: object) -> None:
        raise StartedError

    monkeypatch.setattr("trainer.launch.WorkerGroups", start_groups)
    (tmp_path / "my.py").write_text(FUNCTIONS)

    def start(name: str, recipe: Recipe[Any] = PPO, *more: str) -> None:
        files = "val" if recipe is EVAL else "train"
        settings = [
            f"actor_rollout_ref.model.path={tiny_dir}/model",
            f"data.{files}_files={tiny_dir}/{files}.parquet",
            f"trainer.default_local_dir={tmp_path}/run",
            f"reward.function.path={tmp_path}/my.py",
            f"reward.function.name={name}",
            *(() if recipe is EVAL else TRAINED),
            "data.max_prompt_length=16",
            "data.max_response_length=8",
            f"reward.timeout_s={1 if name == 'hangs' else 60}",
            "trainer.backend=local",
            "trainer.logger=[]",
            *more,
        ]
        run(load_config(settings, recipe))

    return start


@pytest.mark.parametrize("name", ["nothing", "no_score", "late_list", "one_number", "two_numbers"])
def test_a_function_that_returns_no_reward_is_rejected_early(name: str, start: Start) -> None:
    with pytest.raises(
        ConfigError, match="tried on the first row's .* returned .*. Return a number"
    ):
        start(name)


@pytest.mark.parametrize("recipe", [ASYNC, EVAL], ids=["async", "eval"])
def test_other_recipes_try_the_reward_too(recipe: Recipe[Any], start: Start) -> None:
    with pytest.raises(ConfigError, match=r"returned \[[0-9., ]*\]\. Return a number"):
        start("a_list", recipe)


FAILURES = [
    ("fails", "KeyError: .*my.py, line 16: def fails"),
    ("hangs", "passed its deadline"),
    ("nan", "returned nan. Return a number that is finite"),
]


@pytest.mark.parametrize(("name", "problem"), FAILURES)
def test_a_function_that_fails_on_the_first_row_stops_the_run_early(
    name: str, problem: str, start: Start
) -> None:
    with pytest.raises(ConfigError, match=f"(?s)the first row's ground truth: .*{problem}"):
        start(name)


@pytest.mark.parametrize(("name", "problem"), [*FAILURES[:1], ("right", "")])
def test_a_failure_is_only_a_notice_if_failures_are_skipped(
    name: str, problem: str, start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = f"{{name: r, path: {tmp_path}/my.py, function: {name}, on_failure: skip}}"
    with pytest.raises(StartedError):
        start("", PPO, f"reward.list=[{reward}]")
    notices = [line for line in capsys.readouterr().out.splitlines() if "tried on" in line]
    assert len(notices) == bool(problem)
    assert all(line.startswith("note: the reward function ") for line in notices)
    assert all(re.search(problem, line) for line in notices)


def test_an_entry_that_is_no_data_is_named_in_a_notice(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(StartedError):
        start("a_set")
    assert "'letters' (set) cannot be written as JSON and is ignored" in capsys.readouterr().out


def test_a_row_without_a_ground_truth_is_tried_with_its_prompt(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "say a"}\n' * 8)
    with pytest.raises(StartedError):
        start("of_words", PPO, f"data.train_files={tmp_path}/rows.jsonl")


def test_a_run_that_waits_for_its_reward_says_so(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainer.rollouts.preflight.FIRST_MESSAGE_S", 0.2)
    with pytest.raises(StartedError), caplog.at_level("WARNING"):
        start("slow")
    (text,) = [text for text in caplog.messages if "has waited" in text]
    assert "for the reward function 'slow' in " in text
    assert "which scores the first row, before models are loaded" in text


@pytest.mark.parametrize(
    ("name", "words", "is_explained"),
    [
        ("zero", "; every score is 0 (expected if the reward requires a format", True),
        ("constant", "; every score is 0.5\n", False),
        ("letter", "; scores from ", False),
    ],
)
def test_a_dry_run_explains_scores_that_are_all_zero(
    name: str, words: str, is_explained: bool, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    start(name, PPO, "trainer.dry_run=true")
    text = capsys.readouterr().out
    assert f"with their ground truth as response{words}" in text
    assert ("otherwise check the reward" in text) == is_explained


def test_a_dry_run_accepts_a_reward_next_to_an_environment(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = tmp_path / "ends.py"
    environment.write_text(
        "from verl_like import Environment, TrajectoryEnd\n"
        "class Ends(Environment):\n"
        "    def step(self, text): return TrajectoryEnd(1.0)\n"
    )
    start("zero", PPO, f"environment={environment}:Ends", "trainer.dry_run=true")
    assert "No errors found" in capsys.readouterr().out
