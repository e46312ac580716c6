"""Runs whose samples are trajectories: what is trained, what is left out, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import POLICY_ALONE, lines, numbers, overrides
from trainer.config.compose import load_config
from trainer.config.recipe import Recipe
from trainer.detached.recipe import DETACHED
from trainer.launch import run
from trainer.ppo.recipe import PPO
from verl_like.errors import ConfigError, RewardError

GAMES = "tests.workers.agents.games"
REWARD = "def compute_score(solution_str, **row):\n    return 10.0\n"


def settings_of(tiny: Path, folder: Path, *more: str) -> list[str]:
    sizes = ("data.max_prompt_length=24", "data.max_response_length=40")
    turns = ("environment.max_tokens_per_turn=5", "trainer.total_training_steps=2")
    return overrides(tiny, folder, "trainer.backend=local", *sizes, *turns, *more)


def play(tiny: Path, folder: Path, *more: str, recipe: Recipe[Any] = PPO) -> None:
    run(load_config(settings_of(tiny, folder, *more), recipe))


def rows(folder: Path, step: int = 1) -> list[dict[str, Any]]:
    text = (folder / f"rollouts/{step}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("algorithm", [("algorithm=grpo",), ()], ids=["grpo", "gae"])
def test_a_policy_is_trained_on_trajectories(
    algorithm: tuple[str, ...], tiny_dir: Path, tmp_path: Path
) -> None:
    play(tiny_dir, tmp_path / "run", *algorithm, f"environment={GAMES}:Count")
    for line in lines(tmp_path / "run"):
        assert line["agents/num_turns/mean"] == 3.0
        assert line["agents/ended/terminated"] == 1.0
        assert line["critic/score/mean"] == pytest.approx(4.0)
        assert line["reward/num_failed"] == 0
        assert line["actor/grad_norm"] >= 0
    assert {row["score"] for row in rows(tmp_path / "run")} == {4.0}


def test_a_reward_function_is_added_to_the_environments(tiny_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    more = (*POLICY_ALONE, f"custom_reward_function.path={tmp_path}/reward.py")
    play(tiny_dir, tmp_path / "run", *more, f"environment={GAMES}:Count")
    line = lines(tmp_path / "run")[0]
    assert line["critic/score/mean"] == pytest.approx(14.0)
    assert line["reward/environment_score/mean"] == pytest.approx(4.0)


def test_failed_trajectories_are_left_out_and_counted(tiny_dir: Path, tmp_path: Path) -> None:
    more = (*POLICY_ALONE, "environment.retries=0", "environment.max_failed=1")
    play(tiny_dir, tmp_path / "run", *more, f"environment={GAMES}:Flaky")
    line = lines(tmp_path / "run")[0]
    assert 0 < line["reward/num_failed"] < 16
    assert line["reward/num_skipped"] == line["reward/num_failed"]
    assert line["agents/ended/environment"] == line["reward/num_failed"] / 16
    assert line["agents/ended/terminated"] == 1 - line["agents/ended/environment"]
    skipped = [row for row in rows(tmp_path / "run") if row["skipped"]]
    assert len(skipped) == line["reward/num_failed"]


def test_trajectories_that_never_began_are_left_out(tiny_dir: Path, tmp_path: Path) -> None:
    more = (*POLICY_ALONE, "environment.retries=0", "environment.max_failed=1")
    play(tiny_dir, tmp_path / "run", *more, f"environment={GAMES}:NeverBegins")
    for line in lines(tmp_path / "run"):
        assert line["reward/num_skipped"] == 16
        assert line["actor/pg_loss"] == 0


def test_too_many_failures_end_the_run(tiny_dir: Path, tmp_path: Path) -> None:
    more = (*POLICY_ALONE, "environment.retries=0")
    words = (
        r"(?s)'environment' failed for 16 of 16 samples.*environment\.max_failed=0\.5.*has ended"
    )
    with pytest.raises(RewardError, match=words):
        play(tiny_dir, tmp_path / "run", *more, f"environment={GAMES}:Dies")


def test_one_turn_is_a_run_without_an_environment(tiny_dir: Path, tmp_path: Path) -> None:
    """Same noise, same path: an environment that says nothing changes no draw."""
    (tmp_path / "reward.py").write_text(REWARD)
    more = (*POLICY_ALONE, f"custom_reward_function.path={tmp_path}/reward.py")
    sizes = ("data.max_prompt_length=16", "data.max_response_length=8")
    plain = settings_of(tiny_dir, tmp_path / "plain", *more, *sizes)
    run(load_config([one for one in plain if not one.startswith("environment")], PPO))
    silent = f"environment={GAMES}:Silent"
    play(tiny_dir, tmp_path / "run", *more, *sizes, silent, "environment.max_tokens_per_turn=null")
    theirs, ours = numbers(tmp_path / "plain"), numbers(tmp_path / "run")
    for one, other in zip(theirs, ours, strict=True):
        names = [name for name in one if name.startswith(("actor/", "response_length", "critic/"))]
        assert {name: other[name] for name in names} == {name: one[name] for name in names}
    assert [row["output"] for row in rows(tmp_path / "run")] == [
        row["output"] for row in rows(tmp_path / "plain")
    ]


def test_a_file_of_the_current_folder_is_found_by_workers(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Path("tests/workers/agents/games.py").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    play(tiny_dir, tmp_path / "run", *POLICY_ALONE, "environment=mine.py:Count")
    assert lines(tmp_path / "run")[-1]["agents/num_turns/mean"] == 3.0


@pytest.mark.parametrize(
    ("settings", "words", "recipe"),
    [
        (("environment=nowhere.py:Guess",), "nowhere.py: there is no such file", PPO),
        ((f"environment={GAMES}:Nowhere",), "has no such name", PPO),
        ((f"environment={GAMES}:add",), "is no class with a method `reset`", PPO),
        (("environment=Guess",), "give FILE.py:NAME", PPO),
        ((f"environment={GAMES}:Count", "environment.max_turns=0"), "max_turns=0", PPO),
        (("environment.max_turns=3",), "nothing reads it|no environment|one answer", PPO),
        ((f"environment={GAMES}:Count", f"tools=[{GAMES}:add]"), "does not write tools", PPO),
        ((f"environment={GAMES}:Count",), "made between two updates", DETACHED),
    ],
)
def test_what_cannot_be_played_is_refused_before_a_generation(
    settings: tuple[str, ...], words: str, recipe: Recipe[Any], tiny_dir: Path, tmp_path: Path
) -> None:
    own = overrides(tiny_dir, tmp_path / "run", "trainer.backend=local", *settings)
    with pytest.raises(ConfigError, match=words):
        run(load_config(own, recipe))
