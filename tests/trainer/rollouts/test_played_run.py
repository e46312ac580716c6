"""Commands after a run with an environment: replay a trajectory, evaluate, select, chat."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.runs import POLICY_ALONE, lines, overrides
from trainer import run
from trainer.best_of_n.recipe import BEST_OF_N
from trainer.cli import chat
from trainer.cli import replay as command
from trainer.cli.eval import main as evaluate
from trainer.config.compose import load_config
from trainer.data.lm_rows import read_lm_rows
from trainer.data.prompts import load_tokenizer
from trainer.observers.saved_batches import STAGES, batch_file
from trainer.ppo.recipe import PPO
from trainer.replay.replay import replay
from trainer.replay.trajectory import _Row, first_difference, replay_trajectory
from trainer.rollouts.turns import chats_of
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError

COUNT = """from workers.agents import TrajectoryEnd, Environment, Turn

class Count(Environment):
    def reset(self, row, rng):
        self.said, self.goal = 0, int(self.rng.integers(2, 4))
        return "go"

    def step(self, text):
        self.said += 1
        return TrajectoryEnd(1.0) if self.said == self.goal else Turn("no", reward=-0.25)
"""
AGENT = """import openai

def run(row):
    policy, messages = openai.OpenAI(), [{"role": "user", "content": "name it"}]
    for turn in range(4):
        try:
            found = policy.chat.completions.create(model="any", messages=messages, max_tokens=4)
        except openai.BadRequestError:
            return 0.25
        messages += [found.choices[0].message, {"role": "user", "content": "no"}]
        if turn == 1:
            messages = messages[2:]
    return 1.0
"""
"""It forgets its first turn after the second, and is cut where it may have three."""
PLAYED = (
    "data.max_prompt_length=24",
    "data.max_response_length=40",
    "environment.max_tokens_per_turn=5",
    "trainer.backend=local",
)


@pytest.fixture(scope="module")
def played(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, with its environment next to it."""
    folder = tmp_path_factory.mktemp("played")
    (folder / "count.py").write_text(COUNT)
    more = [
        *PLAYED,
        *POLICY_ALONE,
        f"environment={folder}/count.py:Count",
        f"data.val_files=[{tiny_dir}/val.parquet]",
        "trainer.total_training_steps=2",
        "data.train_batch_size=4",
        "trainer.val_before_train=false",
        "trainer.test_freq=2",
        "trainer.save_freq=1",
        "trainer.max_ckpt_to_keep=null",
        "trainer.max_batches_to_keep=1",
    ]
    run(load_config(overrides(tiny_dir, folder / "run", *more), PPO))
    return folder / "run"


def first_sample(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "rollouts/2.jsonl").read_text().splitlines()[0])
    return found


@pytest.fixture(scope="module")
def asked(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of an agent."""
    folder = tmp_path_factory.mktemp("asked")
    (folder / "asks.py").write_text(AGENT)
    more = [
        *PLAYED,
        *POLICY_ALONE,
        f"environment={folder}/asks.py:run",
        "environment.max_turns=3",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        "trainer.max_ckpt_to_keep=null",
        "trainer.max_batches_to_keep=1",
    ]
    run(load_config(overrides(tiny_dir, folder / "run", *more), PPO))
    return folder / "run"


@pytest.mark.parametrize("live", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_requests_of_an_agent_are_made_again_bit_for_bit(asked: Path, live: bool) -> None:
    """Also where the agent has rewritten its history, and where it was cut."""
    sample = first_sample(asked)
    assert (sample["ended"], sample["score"]) == ("max_turns", 0.25)
    assert lines(asked)[-1]["agents/num_segments/mean"] == 2
    found = replay_trajectory(asked, sample["uid"], live=live)
    assert [(one.num_turns, one.difference) for one in found] == [(3, "")] * len(found)


def test_the_chat_of_an_agent_is_what_it_has_asked_last(asked: Path, tiny_dir: Path) -> None:
    batch = DataProto.load_from_disk(batch_file(asked, 2, STAGES[0]))
    for found in chats_of(batch, load_tokenizer(str(tiny_dir / "model"))):
        assert found is not None
        assert [message["role"] for message in found] == ["user", "assistant", "user", "assistant"]
        assert found[0]["content"] == found[2]["content"] == "no"  # it has forgotten the first turn


@pytest.mark.parametrize("live", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_trajectory_is_played_again_bit_for_bit(played: Path, live: bool) -> None:
    sample = first_sample(played)
    (one,) = replay_trajectory(played, f"{sample['uid']}/{sample['sample']}", live=live)
    assert not one.difference
    said = [turn for turn in sample["turns"] if turn["role"] == "assistant"]
    assert (one.num_turns, one.num_tokens) == (len(said), sum(turn["tokens"] for turn in said))


def test_the_first_observation_that_a_changed_environment_gives_is_named(
    played: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = played.parent / "count.py"
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    uid = first_sample(played)["uid"]
    try:
        file.write_text(COUNT.replace('"no"', '"never"'))
        assert not any(one.difference for one in replay_trajectory(played, uid))
        with pytest.raises(SystemExit, match="1"):
            command.main([str(played), "--trajectory", uid, "--live"])
    finally:
        file.write_text(COUNT)
    shown = [line for line in capsys.readouterr().out.splitlines() if "difference" in line]
    assert len(shown) == 2
    for line in shown:
        assert "first difference: the answer to turn 1: was {" in line
        assert "'no'" in line.partition(", is ")[0]
        assert "'never'" in line.partition(", is ")[2]


@pytest.mark.slow
def test_a_step_of_trajectories_is_made_again_but_for_its_seconds(played: Path) -> None:
    found = replay(played, 2)
    assert not found.differences
    assert "score" in found.compared_batches


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nobody-0", "no such uid in the saved batches of steps 2 to 2, which have"),
        ("{uid}/99", "has only the samples 0, 1"),
        ("{uid}/x", "write UID or UID/INDEX"),
    ],
)
def test_a_trajectory_that_there_is_not_is_refused(played: Path, name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        replay_trajectory(played, name.format(uid=first_sample(played)["uid"]))


def test_a_run_that_kept_no_batches_says_which_key_keeps_them(played: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(played, tmp_path / "run", ignore=shutil.ignore_patterns("batches"))
    with pytest.raises(ConfigError, match=r"has no batch\. .*trainer\.max_batches_to_keep=N"):
        replay_trajectory(copy, "0-0")
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace(f"{played.parent}/count.py:Count", "''"))
    with pytest.raises(ConfigError, match="without an environment"):
        replay_trajectory(copy, "0-0")


ROW = _Row(
    prompt=[1, 2],
    tokens=[3, 4, 5, 6],
    turns=[0, 0, 0, 1],
    is_sampled=torch.tensor([True, False, False, True]),
    log_probs=torch.tensor([-1.0, torch.nan, torch.nan, -2.0]),
    answers=[{"text": "go"}, {"messages": [], "reward": 0.0}, {"end": True, "reward": 1.0}],
    ended="terminated",
)


def changed_answer(place: int, **more: Any) -> list[Any]:
    return [{**each, **(more if n == place else {})} for n, each in enumerate(ROW.answers)]


@pytest.mark.parametrize(
    ("now", "words"),
    [
        ({}, ""),
        ({"answers": changed_answer(0, text="come")}, "the first observation: was {'text': 'go'}"),
        (
            {"answers": ROW.answers[:2]},
            "the answer to turn 2: was {'end': True, 'reward': 1.0}, is",
        ),
        ({"tokens": [3, 4, 5, 9]}, r"token 3 of the response, in turn 2: was 6 \("),
        (
            {"tokens": [9, 4, 5, 6], "answers": changed_answer(1, reward=1.0)},
            "token 0 of the response, in turn 1",
        ),
        (
            {"tokens": [3, 4, 9, 9], "answers": changed_answer(1, reward=1.0)},
            "the answer to turn 1",
        ),
        ({"tokens": [3, 4, 5], "turns": [0, 0, 0]}, "token 3 .* is none"),
        ({"tokens": [3, 9, 5, 6]}, "the observed tokens"),
        ({"log_probs": ROW.log_probs + 1e-6}, "the log-prob of token 0 of the response: was -1.0"),
        ({"ended": "length"}, "its end: was terminated, is length"),
    ],
)
def test_the_first_difference_is_named(now: dict[str, Any], words: str, tokenizer: Any) -> None:
    found = first_difference(ROW, replace(ROW, **now), tokenizer)
    assert re.match(words, found)
    assert bool(found) == bool(words)


def test_an_evaluation_plays_what_the_run_did(
    played: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate([str(played), "trainer.logger=[]", f"trainer.default_local_dir={tmp_path}/eval"])
    (found,) = lines(tmp_path / "eval")
    expected = {name: n for name, n in lines(played)[-1].items() if name.startswith("val-")}
    assert {name: n for name, n in found.items() if name.startswith("val-")} == expected
    assert expected["val-aux/agents/success"] == 1
    assert expected["val-aux/agents/ended/terminated"] == 1
    assert 2 <= expected["val-aux/agents/num_turns/mean"] <= 3
    assert "trajectories: success 100.0%, " in capsys.readouterr().out
    rows = (tmp_path / "eval/validation/1.jsonl").read_text().splitlines()
    assert all(len(json.loads(row)["turns"]) in (3, 5) for row in rows)


def test_best_trajectories_become_chats(played: Path, tiny_dir: Path, tmp_path: Path) -> None:
    settings = [
        *PLAYED,
        f"environment={played.parent}/count.py:Count",
        f"actor_rollout_ref.model.path={tiny_dir}/model",
        f"data.train_files={tiny_dir}/few.parquet",
        "actor_rollout_ref.rollout.n=2",
        f"trainer.default_local_dir={tmp_path}/best",
        "trainer.logger=[]",
        "data.train_batch_size=4",
        "trainer.total_training_steps=1",
    ]
    run(load_config(settings, BEST_OF_N))
    rows = [json.loads(row) for row in (tmp_path / "best/selected.jsonl").read_text().splitlines()]
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert row["messages"][0]["content"].endswith("\ngo")
        assert row["messages"][2]["content"] == "no"
        assert row["score"] == 1.25 - 0.25 * len(roles) / 2
    tokenizer = load_tokenizer(str(tiny_dir / "model"))
    read = read_lm_rows("data.train_files", f"{tmp_path}/best/selected.jsonl", tokenizer, 99)
    assert len(read) == len(rows) > 0
    with pytest.raises(ConfigError, match=r"selection\.format=pairs: .* neither tools nor pairs"):
        load_config([*settings, "selection.format=pairs"], BEST_OF_N)
    tools = "environment=tests.workers.agents.games:Counter"
    with pytest.raises(ConfigError, match=r"environment: its tools are increment\..* no tools"):
        run(load_config([*settings, tools, f"trainer.default_local_dir={tmp_path}"], BEST_OF_N))


def chat_with(
    model: Path, said: str, monkeypatch: pytest.MonkeyPatch, show: Callable[[], str], *more: str
) -> list[str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    chat.main([str(model), "--max-tokens", "5", *more])
    return show().splitlines()


def test_a_game_is_played_by_hand_and_by_the_model(
    played: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def show() -> str:
        return capsys.readouterr().out

    environment = ("--environment", f"{played.parent}/count.py:Count")
    by_hand = chat_with(played, "a\nb\nc\n", monkeypatch, show, *environment)
    assert by_hand[:3] == ["environment: 'go'", "> a", "environment: 'no', reward -0.25"]
    assert by_hand[-2:] in (
        ["environment: end, reward 1", "2 turns, reward 0.75"],
        ["environment: end, reward 1", "3 turns, reward 0.5"],
    )
    alone = chat_with(played, "", monkeypatch, show, *environment, "--turns", "1")
    assert alone[1].startswith("policy: ")
    assert alone[2:] == ["environment: 'no', reward -0.25", "1 turns, reward -0.25"]


def test_an_agent_is_answered_by_hand_and_by_the_model(
    asked: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def show() -> str:
        return capsys.readouterr().out

    environment = ("--environment", f"{asked.parent}/asks.py:run")
    found = chat_with(asked, "a\nb\n", monkeypatch, show, *environment)
    assert found[:3] == ["environment: 'name it', reward 0", "> a", "environment: 'no', reward 0"]
    assert found[-2:] == ["environment: end, reward 1", "4 turns, reward 1"]
    assert sum(line.startswith("policy: ") for line in found) == 2
    ids = ("--environment", "tests.workers.agents.agents:by_ids")
    with pytest.raises(ConfigError, match="sends token ids"):
        chat.main([str(asked), *ids])
