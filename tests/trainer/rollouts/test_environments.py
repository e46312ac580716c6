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
from trainer.launch import run
from trainer.ppo.recipe import PPO
from trainer.rollouts.turns import waits_for_environments
from trainer.run_folder.accounts import tokens_of
from trainer.run_folder.result import RunResult
from verl_like.batch.columns import object_rows
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError, RewardError

GAMES = "tests.workers.agents.games"
REWARD = "def compute_score(solution_str, **row):\n    return 10.0\n"


def play(tiny: Path, folder: Path, *more: str) -> None:
    """Run one step, by default of eight samples."""
    sizes = ("data.max_prompt_length=24", "data.max_response_length=40", "data.train_batch_size=4")
    turns = ("environment.max_tokens_per_turn=5", "trainer.total_training_steps=1")
    run(load_config(overrides(tiny, folder, "trainer.backend=local", *sizes, *turns, *more), PPO))


def rows(folder: Path, step: int = 1) -> list[dict[str, Any]]:
    return lines(folder, f"rollouts/{step}.jsonl")


def test_retokenized_turns_are_trained(tiny_dir: Path, tmp_path: Path) -> None:
    """The template writes no end of a turn, so an ended turn is written again."""
    shutil.copytree(tiny_dir, tmp_path / "tiny")
    jinja = tmp_path / "tiny" / "model" / "chat_template.jinja"
    jinja.write_text(jinja.read_text().replace("eos_token", "''"))
    template = "environment.history_tokens=retokenized"
    play(
        tmp_path / "tiny",
        tmp_path / "run",
        f"environment={GAMES}:Count",
        template,
        "trainer.seed=3",
    )
    (line,) = lines(tmp_path / "run")
    assert line["agents/num_segments/mean"] > 1.0
    assert line["training/num_hash_matched_samples"] == 8
    assert line["training/rollout_probs_diff_max"] < 1e-4


@pytest.mark.long
def test_a_hanging_environment_is_punished(tiny_dir: Path, tmp_path: Path) -> None:
    hang = (
        f"environment={GAMES}:HangsWhenTold",
        "environment.step_timeout_s=8",
        "environment.retries=0",
    )
    play(tiny_dir, tmp_path / "run", *POLICY_ALONE, *hang, "environment.reward_on_failure=-1")
    line = lines(tmp_path / "run")[0]
    num_hung = line["reward/num_failed"]
    assert 0 < num_hung < 8
    assert line["reward/num_skipped"] == 0
    assert line["agents/ended/deadline"] == num_hung / 8
    scores = {bool(row["problem"]): row["score"] for row in rows(tmp_path / "run")}
    assert scores == {True: -1.0, False: 0.0}
    for row in rows(tmp_path / "run"):
        assert sum(turn["reward"] or 0.0 for turn in row["turns"]) == row["score"]
    assert line["critic/advantages/min"] < 0 < line["critic/advantages/max"]


def test_rewards_by_completion_id_are_written_at_their_turns(
    tiny_dir: Path, tmp_path: Path
) -> None:
    agent = "environment=tests.workers.agents.agents:rewards_turns"
    play(tiny_dir, tmp_path / "run", *POLICY_ALONE, agent)
    for row in rows(tmp_path / "run"):
        assert (row["score"], row["problem"]) == (4.5, None)
        sampled = [turn["reward"] for turn in row["turns"] if "tokens" in turn]
        assert sampled == [0.5, 1.5, 2.5]


def test_killed_environments_give_no_reward(tiny_dir: Path, tmp_path: Path) -> None:
    kills = (
        f"environment.kwargs.folder={tmp_path}",
        "environment.retries=0",
        "environment.max_failed_fraction=1",
    )
    play(tiny_dir, tmp_path / "run", *POLICY_ALONE, *kills, f"environment={GAMES}:Faulty")
    num_killed = (tmp_path / "killed").stat().st_size
    (line,) = lines(tmp_path / "run")
    assert 0 < line["reward/num_failed"] == line["reward/num_skipped"] == num_killed < 8
    for row in rows(tmp_path / "run"):
        assert row["skipped"] or row["score"] == 4.0
    trained, left_out = tokens_of([line])
    assert left_out.keys() == {"on_failure=skip"}
    assert line["training/num_sampled_tokens"] == trained + left_out.total()


def test_too_many_failures_end_the_run(tiny_dir: Path, tmp_path: Path) -> None:
    more = (*POLICY_ALONE, "environment.retries=0")
    words = r"(?s)'environment' failed for 8 of 8.*environment\.max_failed_fraction=0\.5.*has ended"
    with pytest.raises(RewardError, match=words):
        play(tiny_dir, tmp_path / "run", *more, f"environment={GAMES}:Dies")


def test_one_turn_equals_a_run_without_an_environment(tiny_dir: Path, tmp_path: Path) -> None:
    """Same noise, same path: an environment without observations changes no draw."""
    (tmp_path / "reward.py").write_text(REWARD)
    more = (*POLICY_ALONE, f"reward.function.path={tmp_path}/reward.py")
    more += ("data.max_prompt_length=16", "data.max_response_length=8")
    play(tiny_dir, tmp_path / "plain", *more, "environment.max_tokens_per_turn=null")
    silent = f"environment={GAMES}:Silent"
    play(tiny_dir, tmp_path / "run", *more, silent, "environment.max_tokens_per_turn=null")
    (plain,), (played,) = numbers(tmp_path / "plain"), numbers(tmp_path / "run")
    names = [name for name in plain if name.startswith(("actor/", "response_length", "critic/"))]
    assert {name: played[name] for name in names} == {name: plain[name] for name in names}
    assert [row["output"] for row in rows(tmp_path / "run")] == [
        row["output"] for row in rows(tmp_path / "plain")
    ]


def test_a_number_of_trajectories_needs_no_file(tiny_dir: Path, tmp_path: Path) -> None:
    """Every row is a new episode in every epoch; the samples of a prompt share it."""
    more = ("data.train_files=4", "trainer.total_epochs=2", "trainer.total_training_steps=null")
    play(tiny_dir, tmp_path / "run", *POLICY_ALONE, *more, f"environment={GAMES}:ByLot")
    counts = Counter(row["input"] for step in (1, 2) for row in rows(tmp_path / "run", step))
    assert sorted(counts.values()) == [2] * 8
    assert [start["rows"] for start in lines(tmp_path / "run", "starts.jsonl")] == [4]
    assert all(re.search(r"\d", text) for text in counts)


def test_each_of_several_environments_is_validated_and_has_its_share(
    tiny_dir: Path, tmp_path: Path
) -> None:
    for file, names in (
        ("train", ["count"] * 2 + ["silent"] * 9),
        ("val", ["count", *["silent"] * 3]),
    ):
        rows = [json.dumps({"prompt": "a", "environment": name}) for name in names]
        (tmp_path / f"{file}.jsonl").write_text("\n".join(rows))
    play(
        tiny_dir,
        tmp_path / "run",
        *POLICY_ALONE,
        f"environment={{count: '{GAMES}:Count', silent: '{GAMES}:Silent'}}",
        "environment.by_name={count: {share: 0.25}, silent: {share: 0.75}}",
        f"data.train_files={tmp_path}/train.jsonl",
        f"data.val_files={tmp_path}/val.jsonl",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=false",
    )
    first, last = lines(tmp_path / "run")
    for name, share, num_turns, success in (("count", 0.25, 3, 1.0), ("silent", 0.75, 1, 0.0)):
        prefix = f"agents/by_environment/{name}"
        assert first[f"{prefix}/share"] == last[f"{prefix}/share"] == share
        validated = {
            key.rpartition("/")[2]: n for key, n in last.items() if f"val-aux/{prefix}/" in key
        }
        assert validated == {"share": share, "mean": num_turns, "num_failed": 0, "success": success}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("environment=nowhere.py:Guess",), "nowhere.py:Guess: there is no such file"),
        ((f"environment={GAMES}:Count", "environment.max_turns=0"), "max_turns=0"),
        (
            (
                f"environment={{a: '{GAMES}:Count'}}",
                "environment.by_name={a: {max_turns: 2, max_tokens_per_segment: 24}}",
            ),
            "max_tokens_per_segment=24 of a leaves no tokens after a prompt of .*_length=24",
        ),
        (
            (f"environment={GAMES}:NeedsLevel",),
            "environment: .reset. has the parameter 'level'.* no such column, only",
        ),
        (("data.train_files=8",), "is a number of prompts, but there is no environment"),
        ((f"environment={GAMES}:Count", f"tools=[{GAMES}:add]"), "does not write tools"),
    ],
)
def test_an_environment_that_cannot_be_played_is_rejected_early(
    settings: tuple[str, ...], words: str, tiny_dir: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        play(tiny_dir, tmp_path / "run", *settings)


def test_files_of_a_run_have_rewards_turns_and_environments(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both functions are in files of the current folder."""
    folder = tmp_path / "run"
    (tmp_path / "reward.py").write_text(REWARD)
    shutil.copy("tests/workers/agents/games.py", tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    play(
        tiny_dir,
        folder,
        *POLICY_ALONE,
        "reward.function.path=reward.py",
        "environment=mine.py:Count",
    )
    (line,) = lines(folder)
    assert line["critic/score/mean"] == pytest.approx(14.0)
    assert line["reward/environment_score/mean"] == pytest.approx(4.0)
    for row in RunResult(folder, "", [], None).samples():
        assert row["ended"] == "terminated"
        assert [(turn["role"], turn["reward"]) for turn in row["turns"]] == [
            ("assistant", 0.5), ("user", None), ("assistant", 0.5), ("user", None),
            ("assistant", 3.0),
        ]  # fmt: skip
        sampled, observed = row["turns"][::2], row["turns"][1::2]
        assert [turn["text"] for turn in observed] == ["1", "2"]
        assert "".join(turn["text"] for turn in sampled) == row["output"]
        assert all(turn["environment_s"] < 5 and turn["engine_s"] > 0 for turn in sampled)
        assert [turn["observed_tokens"] > 0 for turn in sampled] == [True, True, False]

    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    (lane,) = [e for e in events if e["name"] == "thread_name" and "environments" in str(e["args"])]
    waits = [e for e in events if e["ph"] == "X" and e["tid"] == lane["tid"]]
    assert sum(e["args"]["num_answers"] for e in waits) == 8 * 4
    calls = [e for e in events if e["name"] == "generate_sequences"]
    for wait in waits:
        assert any(c["ts"] <= wait["ts"] <= c["ts"] + c["dur"] for c in calls)
        assert wait["args"]["busy_s"] <= 8 * wait["dur"] / 1e6
    assert line["timing_s/environments"] <= line["timing_s/sample"]
    assert "Success by turns" in (folder / "report.html").read_text()


def test_waits_with_short_pauses_are_joined() -> None:
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
