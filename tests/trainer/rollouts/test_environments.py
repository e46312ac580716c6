"""Runs whose samples are trajectories: training, dropped samples, and errors."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import POLICY_ALONE, lines, numbers, overrides
from trainer.config.compose import load_config
from trainer.config.recipe import Recipe
from trainer.launch import run
from trainer.ppo.recipe import PPO
from trainer.report.accounts import tokens_of
from trainer.rollouts.turns import waits_for_environments
from trainer.run_folder.result import RunResult
from verl_like.batch.columns import object_rows
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError, RewardError

GAMES = "tests.workers.agents.games"
REWARD = "def compute_score(solution_str, **row):\n    return 10.0\n"


def settings_of(tiny: Path, folder: Path, *more: str) -> list[str]:
    sizes = ("data.max_prompt_length=24", "data.max_response_length=40")
    turns = ("environment.max_tokens_per_turn=5", "trainer.total_training_steps=1")
    return overrides(tiny, folder, "trainer.backend=local", *sizes, *turns, *more)


def play(tiny: Path, folder: Path, *more: str, recipe: Recipe[Any] = PPO) -> None:
    """Run one step."""
    run(load_config(settings_of(tiny, folder, *more), recipe))


def rows(folder: Path, step: int = 1) -> list[dict[str, Any]]:
    text = (folder / f"rollouts/{step}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_retokenized_turns_are_trained(tiny_dir: Path, tmp_path: Path) -> None:
    """The tiny template writes no end of a turn, so an ended turn is written again."""
    template = "environment.history_tokens=retokenized"
    play(tiny_dir, tmp_path / "run", f"environment={GAMES}:Count", template, "trainer.seed=3")
    for line in lines(tmp_path / "run"):
        assert line["agents/num_segments/mean"] > 1.0
        assert line["training/num_hash_matched_samples"] == 16
        assert line["training/rollout_probs_diff_max"] < 1e-4


def test_a_reward_is_added_to_an_environment_both_in_files_of_the_current_folder(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    shutil.copy("tests/workers/agents/games.py", tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    more = (*POLICY_ALONE, "reward.function.path=reward.py")
    play(tiny_dir, tmp_path / "run", *more, "environment=mine.py:Count")
    line = lines(tmp_path / "run")[0]
    assert line["critic/score/mean"] == pytest.approx(14.0)
    assert line["reward/environment_score/mean"] == pytest.approx(4.0)


def test_a_hanging_environment_is_punished(tiny_dir: Path, tmp_path: Path) -> None:
    hang = (
        f"environment={GAMES}:HangsWhenTold",
        "environment.step_timeout_s=3",
        "environment.retries=0",
    )
    play(tiny_dir, tmp_path / "run", *POLICY_ALONE, *hang, "environment.reward_on_failure=-1")
    line = lines(tmp_path / "run")[0]
    num_hung = line["reward/num_failed"]
    assert 0 < num_hung < 16
    assert line["reward/num_skipped"] == 0
    assert line["agents/ended/deadline"] == num_hung / 16
    scores = {bool(row["problem"]): row["score"] for row in rows(tmp_path / "run")}
    assert scores == {True: -1.0, False: 0.0}
    assert line["critic/advantages/min"] < 0 < line["critic/advantages/max"]


def test_killed_environments_give_no_reward(tiny_dir: Path, tmp_path: Path) -> None:
    kills = (
        "faults.kill_environment=0.3",
        "environment.retries=0",
        "environment.max_failed_fraction=1",
    )
    play(tiny_dir, tmp_path / "run", *POLICY_ALONE, *kills, f"environment={GAMES}:Count")
    *faults, ledger = lines(tmp_path / "run", "faults.jsonl")
    for step, line in enumerate(lines(tmp_path / "run"), 1):
        assert 0 < line["reward/num_failed"] == line["reward/num_skipped"] < 16
        found = [one["count"] for one in faults if one["step"] == step]
        assert found == [line["reward/num_failed"]]
        for row in rows(tmp_path / "run", step):
            assert row["skipped"] or row["score"] == 4.0
    trained, left_out = tokens_of(lines(tmp_path / "run"))
    assert left_out.keys() == {"on_failure=skip"}
    drawn = sum(line["training/num_sampled_tokens"] for line in lines(tmp_path / "run"))
    assert drawn == trained + left_out.total()
    samples = ledger["samples"]
    assert samples["dropped"] == {"on_failure=skip": sum(one["count"] for one in faults)}
    assert samples["made"] == 16 == samples["trained"] + samples["dropped"]["on_failure=skip"]


def test_too_many_failures_end_the_run(tiny_dir: Path, tmp_path: Path) -> None:
    more = (*POLICY_ALONE, "environment.retries=0")
    words = (
        r"(?s)'environment' failed for 16 of 16.*environment\.max_failed_fraction=0\.5.*has ended"
    )
    with pytest.raises(RewardError, match=words):
        play(tiny_dir, tmp_path / "run", *more, f"environment={GAMES}:Dies")


def test_one_turn_is_a_run_without_an_environment(tiny_dir: Path, tmp_path: Path) -> None:
    """Same noise, same path: an environment without observations changes no draw."""
    (tmp_path / "reward.py").write_text(REWARD)
    more = (*POLICY_ALONE, f"reward.function.path={tmp_path}/reward.py")
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


def test_a_number_of_games_needs_no_file(tiny_dir: Path, tmp_path: Path) -> None:
    """Every row is a new game in every epoch; the samples of a prompt share it."""
    games = ("data.train_files=4", "data.train_batch_size=4", "trainer.total_epochs=2")
    steps = ("trainer.total_training_steps=null", f"environment={GAMES}:ByLot")
    play(tiny_dir, tmp_path / "run", *POLICY_ALONE, *games, *steps)
    found = [row for step in (1, 2) for row in rows(tmp_path / "run", step)]
    samples = len(found) // 8
    assert samples > 1
    counts = Counter(row["input"] for row in found)
    assert sorted(counts.values()) == [samples] * 8
    assert all(re.search(r"\d", one) for one in counts)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("environment=nowhere.py:Guess",), "nowhere.py: there is no such file"),
        ((f"environment={GAMES}:Count", "environment.max_turns=0"), "max_turns=0"),
        ((f"environment={GAMES}:NeedsLevel",), "reset needs 'level'.* no such column, only"),
        (("data.train_files=8",), "is a number of trajectories, but there is no environment"),
        ((f"environment={GAMES}:Count", f"tools=[{GAMES}:add]"), "does not write tools"),
    ],
)
def test_what_cannot_be_played_is_refused_before_a_generation(
    settings: tuple[str, ...], words: str, tiny_dir: Path, tmp_path: Path
) -> None:
    own = overrides(tiny_dir, tmp_path / "run", "trainer.backend=local", *settings)
    with pytest.raises(ConfigError, match=words):
        run(load_config(own, PPO))


def test_samples_have_turns_and_the_timeline_environments(tiny_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    play(tiny_dir, folder, *POLICY_ALONE, f"environment={GAMES}:Count")
    for row in RunResult(folder, "", [], None).samples():
        assert row["ended"] == "terminated"
        assert [(turn["role"], turn["reward"]) for turn in row["turns"]] == [
            ("assistant", 0.5), ("user", None), ("assistant", 0.5), ("user", None),
            ("assistant", 3.0),
        ]  # fmt: skip
        said, observed = row["turns"][::2], row["turns"][1::2]
        assert [turn["text"] for turn in observed] == ["1", "2"]
        assert "".join(turn["text"] for turn in said) == row["output"]
        assert all(turn["environment_s"] < 5 and turn["engine_s"] > 0 for turn in said)
        assert [turn["observed_tokens"] > 0 for turn in said] == [True, True, False]

    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    (lane,) = [e for e in events if e["name"] == "thread_name" and "environments" in str(e["args"])]
    waits = [e for e in events if e["ph"] == "X" and e["tid"] == lane["tid"]]
    assert sum(e["args"]["num_answers"] for e in waits) == 16 * 4
    calls = [e for e in events if e["name"] == "generate_sequences"]
    for wait in waits:
        assert any(c["ts"] <= wait["ts"] <= c["ts"] + c["dur"] for c in calls)
        assert wait["args"]["busy_s"] <= 16 * wait["dur"] / 1e6
    assert lines(folder)[0]["timing_s/environments"] <= lines(folder)[0]["timing_s/gen"]
    assert "Success by turns" in (folder / "report.html").read_text()


def test_waits_are_joined_where_pauses_are_short() -> None:
    def trajectory(*waits: tuple[float, float]) -> dict[str, Any]:
        return {"times": [{"asked": a, "heard": b, "environment": 0.25} for a, b in waits]}

    facts = [trajectory((0.0, 2.0), (5.0, 6.0), (0.0, 0.0)), trajectory((1.0, 4.99)), {}]
    batch = DataProto.from_dict({}, {"trajectory": object_rows(facts)})
    (call,) = waits_for_environments(batch)
    assert (call["start"], call["end"], call["busy_s"], call["num_answers"]) == (0.0, 6.0, 0.75, 3)
    batch.non_tensor_batch["trajectory"][1] = trajectory((1.0, 4.0))
    assert [(call["start"], call["end"]) for call in waits_for_environments(batch)] == [
        (0.0, 4.0),
        (5.0, 6.0),
    ]
