"""Commands after a run with an environment: replay a step, evaluate, select."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import POLICY_ALONE, lines, overrides
from trainer import run
from trainer.best_of_n.recipe import BEST_OF_N
from trainer.cli.eval import main as evaluate
from trainer.config.compose import load_config
from trainer.data.lm_rows import read_lm_rows
from trainer.data.prompts import load_tokenizer
from trainer.ppo.recipe import PPO
from trainer.replay.replay import replay
from trainer.roadside.saved_batches import STAGES, batch_file
from trainer.rollouts.turns import chats_of
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError

COUNT = """from workers.agents import End, Environment, Turn

class Count(Environment):
    def reset(self, row, rng):
        self.said, self.goal = 0, int(self.rng.integers(2, 4))
        return "go"

    def step(self, text):
        self.said += 1
        return End(1.0) if self.said == self.goal else Turn("no", reward=-0.25)
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
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        "trainer.max_ckpt_to_keep=null",
        "trainer.max_batches_to_keep=1",
    ]
    run(load_config(overrides(tiny_dir, folder / "run", *more), PPO))
    return folder / "run"


def test_the_chat_of_an_agent_is_what_it_has_asked_last(asked: Path, tiny_dir: Path) -> None:
    batch = DataProto.load_from_disk(batch_file(asked, 2, STAGES[0]))
    for found in chats_of(batch, load_tokenizer(str(tiny_dir / "model"))):
        assert found is not None
        assert [message["role"] for message in found] == ["user", "assistant", "user", "assistant"]
        assert found[0]["content"] == found[2]["content"] == "no"  # it has forgotten the first turn


@pytest.mark.slow
def test_a_step_of_trajectories_is_made_again_but_for_its_seconds(played: Path) -> None:
    found = replay(played, 2)
    assert not found.differences
    assert "score" in found.kept_batches


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


def test_the_best_trajectories_become_chats_that_sft_reads(
    played: Path, tiny_dir: Path, tmp_path: Path
) -> None:
    settings = [
        *PLAYED,
        f"environment={played.parent}/count.py:Count",
        f"actor_rollout_ref.model.path={tiny_dir}/model",
        f"data.train_files={tiny_dir}/val.parquet",
        "actor_rollout_ref.rollout.n=4",
        f"trainer.default_local_dir={tmp_path}/best",
        "trainer.logger=[]",
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
    with pytest.raises(ConfigError, match=r"selection\.write=pairs: .* no other side"):
        load_config([*settings, "selection.write=pairs"], BEST_OF_N)
    tools = "environment=tests.workers.agents.games:Counter"
    with pytest.raises(ConfigError, match=r"Counter: its methods increment are tools\..* no tools"):
        run(load_config([*settings, tools, f"trainer.default_local_dir={tmp_path}"], BEST_OF_N))
