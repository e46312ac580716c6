"""Commands after a run with an environment: replay a trajectory, evaluate, select, chat."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from examples.best_of_n.best_of_n import BestOfN
from tests.integration.runs import POLICY_ALONE, lines, overrides
from trainer import run
from trainer.cli import chat
from trainer.cli import replay as command
from trainer.cli.eval import main as evaluate
from trainer.config.compose import load_config
from trainer.data.lm_rows import read_lm_rows
from trainer.observers.saved_batches import STAGES, batch_file
from trainer.ppo.recipe import PPO
from trainer.rollouts.turns import trajectory_chats
from trainer.tools.evaluation.recipe import EVAL
from trainer.tools.replay.replay import replay
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError

COUNT = """from workers.agents import Environment, Observation, TrajectoryEnd

class Count(Environment):
    def reset(self, row, rng):
        self.turns, self.goal = 0, int(self.rng.integers(2, 4))
        return "go"

    def step(self, text):
        self.turns += 1
        return TrajectoryEnd(1.5) if self.turns == self.goal else Observation("no", reward=-0.25)
"""
AGENT = """import json
from urllib.error import HTTPError
from urllib.request import Request, urlopen

def respond(base_url, api_key, messages):
    body = json.dumps({"model": "any", "messages": messages, "max_tokens": 4}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urlopen(Request(f"{base_url}/chat/completions", body, headers)) as response:
        return json.load(response)["choices"][0]["message"]

def run(row, base_url, api_key):
    messages = [{"role": "user", "content": "name it"}]
    for turn in range(4):
        try:
            messages.append(respond(base_url, api_key, messages))
        except HTTPError:
            return 0.25
        messages.append({"role": "user", "content": "no"})
        if turn == 1:
            messages = messages[2:]
    return 1.0
"""
"""It forgets its first turn after the second, and is cut off where it may have three."""
PLAYED = (
    "data.max_prompt_length=24",
    "data.max_response_length=40",
    "environment.max_tokens_per_turn=5",
    "trainer.backend=local",
)
TWO_STEPS = (
    *PLAYED,
    *POLICY_ALONE,
    "trainer.total_training_steps=2",
    "trainer.save_freq=1",
    "trainer.max_ckpt_to_keep=null",
    "trainer.batch_steps_to_keep=1",
)


@pytest.fixture(scope="module")
def played(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run, with its environment next to it."""
    folder = tmp_path_factory.mktemp("played")
    (folder / "count.py").write_text(COUNT)
    settings = [
        f"environment={folder}/count.py:Count",
        f"data.val_files=[{tiny_dir}/val.parquet]",
        "data.train_batch_size=4",
        "trainer.val_before_train=false",
        "trainer.test_freq=2",
    ]
    run(load_config(overrides(tiny_dir, folder / "run", *TWO_STEPS, *settings), PPO))
    return folder / "run"


def first_sample(folder: Path) -> dict[str, Any]:
    return lines(folder, "rollouts/2.jsonl")[0]


@pytest.fixture(scope="module")
def agent_run(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of an agent."""
    folder = tmp_path_factory.mktemp("asked")
    (folder / "asks.py").write_text(AGENT)
    settings = [
        f"environment={folder}/asks.py:run",
        "environment.max_turns=3",
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ]
    run(load_config(overrides(tiny_dir, folder / "run", *TWO_STEPS, *settings), PPO))
    return folder / "run"


@pytest.mark.slow
def test_requests_of_an_agent_are_replayed_bit_for_bit(agent_run: Path) -> None:
    """Also where the agent has rewritten its history, and where it was cut off."""
    sample = first_sample(agent_run)
    assert (sample["ended"], sample["score"]) == ("max_turns", 0.25)
    assert lines(agent_run)[-1]["agents/num_segments/mean"] == 2
    replayed = replay(agent_run, 2)
    assert not replayed.differences
    assert "score" in replayed.compared_batches


def test_the_chat_of_an_agent_is_its_last_request(agent_run: Path, tokenizer: Any) -> None:
    batch = DataProto.load_from_disk(batch_file(agent_run, 2, STAGES[0]))
    for messages in trajectory_chats(batch, tokenizer):
        assert messages is not None
        assert [row["role"] for row in messages] == ["user", "assistant", "user", "assistant"]
        assert messages[0]["content"] == messages[2]["content"] == "no"  # without the first turn


@pytest.fixture
def changed_environment(played: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Change the observations of the environment."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    file = played.parent / "count.py"
    file.write_text(COUNT.replace('"no"', '"never"'))
    yield
    file.write_text(COUNT)


def test_a_replay_names_the_trajectories_of_an_environment_that_has_changed(
    played: Path, changed_environment: None, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        command.main([str(played), "--step", "2"])
    assert "batch of score: trajectory differs in " in capsys.readouterr().out


@pytest.mark.slow
def test_a_step_of_trajectories_is_replayed_bit_for_bit(played: Path) -> None:
    replayed = replay(played, 2)
    assert not replayed.differences
    assert "score" in replayed.compared_batches


def test_an_evaluation_has_the_validation_metrics_of_the_run(
    played: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate([str(played), "trainer.logger=[]", f"trainer.default_local_dir={tmp_path}/eval"])
    (metrics,) = lines(tmp_path / "eval")
    expected = {name: n for name, n in lines(played)[-1].items() if name.startswith("val-")}
    assert {name: n for name, n in metrics.items() if name.startswith("val-")} == expected
    assert expected["val-aux/agents/success"] == 1
    assert expected["val-aux/agents/ended/terminated"] == 1
    assert 2 <= expected["val-aux/agents/num_turns/mean"] <= 3
    assert "trajectories: success 100.0%, " in capsys.readouterr().out
    rows = lines(tmp_path / "eval", "validation/1.jsonl")
    assert all(len(row["turns"]) in (3, 5) for row in rows)


def test_best_trajectories_become_chats(
    played: Path, tiny_dir: Path, tmp_path: Path, tokenizer: Any
) -> None:
    settings = [
        *PLAYED,
        f"environment={played.parent}/count.py:Count",
        f"actor_rollout_ref.model.path={tiny_dir}/model",
        f"data.val_files={tiny_dir}/few.parquet",
        "actor_rollout_ref.rollout.val_kwargs={n: 2, do_sample: true, temperature: 1.0}",
        f"trainer.default_local_dir={tmp_path}/best",
        "trainer.logger=[]",
        "data.train_batch_size=4",
    ]
    run(load_config(settings, EVAL), BestOfN)
    rows = lines(tmp_path / "best", "best.jsonl")
    for row in rows:
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        assert row["messages"][0]["content"].endswith("\ngo")
        assert row["messages"][2]["content"] == "no"
        assert row["score"] == 1.75 - 0.25 * len(roles) / 2
    read = read_lm_rows("data.train_files", f"{tmp_path}/best/best.jsonl", tokenizer, 99)
    assert len(read) == len(rows) > 0


Chat = Callable[..., list[str]]


@pytest.fixture
def chat_with(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Chat:
    """Return a function that chats with a run's model and environment, and returns the output."""

    def chat_with(run: Path, environment: str, typed: str, *options: str) -> list[str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        played = ("--environment", f"{run.parent}/{environment}")
        chat.main([str(run), "--max-tokens", "5", *played, *options])
        return capsys.readouterr().out.splitlines()

    return chat_with


def test_an_environment_is_played_by_hand_and_by_the_model(played: Path, chat_with: Chat) -> None:
    by_hand = chat_with(played, "count.py:Count", "a\nb\nc\n")
    assert by_hand[:3] == ["environment: 'go'", "> a", "environment: 'no', reward -0.25"]
    assert by_hand[-2:] in (
        ["environment: end, reward 1.5", "2 turns, reward 1.25"],
        ["environment: end, reward 1.5", "3 turns, reward 1"],
    )
    by_model = chat_with(played, "count.py:Count", "", "--max-turns", "1")
    assert by_model[1].startswith("policy: ")
    assert by_model[2:] == ["environment: 'no', reward -0.25", "1 turns, reward -0.25"]


def test_an_agent_is_answered_by_hand_and_by_the_model(agent_run: Path, chat_with: Chat) -> None:
    shown = chat_with(agent_run, "asks.py:run", "a\nb\n")
    assert shown[:3] == ["environment: 'name it', reward 0", "> a", "environment: 'no', reward 0"]
    assert shown[-2:] == ["environment: end, reward 1", "4 turns, reward 1"]
    assert sum(line.startswith("policy: ") for line in shown) == 2
    ids = ("--environment", "tests.workers.agents.agents:by_ids")
    with pytest.raises(ConfigError, match="sends token ids"):
        chat.main([str(agent_run), *ids])
