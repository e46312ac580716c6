"""The scripts of `benchmarks/peers` run one job, and read each framework's output into one row.

The frameworks are not here: their commands are read as `verl-like migrate` reads them.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.conftest import load
from tests.forked import run_program
from tests.trainer.tools.migrate.words import migrated
from trainer import load_config

PEERS = ROOT / "benchmarks" / "peers"
SCRIPTS = ("verl_like", "verl", "openrlhf", "trl")
JOB = {
    "MODEL": "m",
    "PROMPTS": "p.parquet",
    "BATCH": "64",
    "MINI_BATCH": "32",
    "SAMPLES": "4",
    "EPOCHS": "2",
    "STEPS": "5",
    "MAX_PROMPT": "100",
    "MAX_RESPONSE": "200",
    "LR": "2e-6",
    "GPUS": "2",
    "PASS_TOKENS": "4096",
    "ENGINE_MEMORY": "0.4",
}
SAME = {
    "algorithm.adv_estimator": "grpo",
    "data.max_prompt_length": 100,
    "data.max_response_length": 200,
    "data.train_batch_size": 64,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.model.path": "m",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
    "actor_rollout_ref.actor.ppo_epochs": 2,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 4096,
    "actor_rollout_ref.actor.optim.lr": 2e-6,
    "actor_rollout_ref.actor.optim.weight_decay": 0.01,
    "actor_rollout_ref.actor.grad_clip": 1.0,
    "actor_rollout_ref.actor.use_kl_loss": False,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.4,
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.rollout.temperature": 1.0,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "algorithm.use_kl_in_reward": False,
    "reward.function.path": str(PEERS / "reward.py"),
    "trainer.n_gpus_per_node": 2,
    "trainer.nnodes": 1,
    "trainer.total_training_steps": 5,
}


def printed(script: str, folder: Path, **job: str) -> str:
    """Return the command of a script, which runs nothing."""
    done = subprocess.run(
        ["bash", str(PEERS / f"{script}_job.sh"), *job.pop("more", "").split()],
        env={**os.environ, **JOB, "PRINT": "1", "OUT": str(folder / "out"), **job},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def value_of(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def settings_of(script: str, command: str) -> list[str]:
    """Return the settings as our keys."""
    if script == "verl_like":
        words = shlex.split(command)
        return [word for word in words if "=" in word and word != "trainer.device=cuda"]
    return migrated(script, command).overrides()


@pytest.mark.parametrize("script", ["verl_like", "verl", "openrlhf"])
def test_the_frameworks_get_the_same_job(script: str, tmp_path: Path) -> None:
    config = load_config([*settings_of(script, printed(script, tmp_path)), "trainer.dry_run=true"])
    assert {key: value_of(config, key) for key in SAME} == SAME


def test_trl_gets_the_same_job(tmp_path: Path) -> None:
    words = shlex.split(printed("trl", tmp_path))
    assert words[:5] == ["python3", "-m", "accelerate.commands.launch", "--num_processes", "2"]
    assert words[5] == str(PEERS / "trl_job.py")
    options = dict(zip(words[6::2], words[7::2], strict=True))
    wanted = "--model m --batch 64 --mini-batch 32 --samples 4 --epochs 2 --steps 5 --lr 2e-6"
    wanted += " --max-response 200 --max-length 300 --gpus 2 --device cuda --engine-memory 0.4"
    pairs = wanted.split()
    assert {name: options[name] for name in pairs[::2]} == dict(
        zip(pairs[::2], pairs[1::2], strict=True)
    )


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_prints_its_command_and_leaves_nothing(script: str, tmp_path: Path) -> None:
    command = printed(script, tmp_path, more="--one-more two")
    assert shlex.split(command)[-2:] == ["--one-more", "two"]
    assert list(tmp_path.iterdir()) == []


SECONDS = {1: 50.0, 2: 3.0, 3: 5.0}
LENGTH = {"response_length/mean": 10.0}
WRITTEN = {
    "verl": "\n".join(
        json.dumps({"step": step, "data": {"timing_s/step": s, "timing_s/gen": s / 2, **LENGTH}})
        for step, s in SECONDS.items()
    ),
    "openrlhf": "\n".join(
        f"\x1b[36m(PPOTrainer pid=7)\x1b[0m INFO Global step {step}: {{'policy_loss': -1e-05, "
        f"'timing/ppo_train': {seconds / 2}, 'timing/generation': {seconds / 2}, "
        f"'rollout/response_length_mean': 10.0, 'timing/step_total': {seconds}}}"
        for step, seconds in SECONDS.items()
    ),
    "trl": "\n".join(
        json.dumps({"step": step, "seconds": seconds, "response_tokens": 40.0})
        for step, seconds in SECONDS.items()
    ),
}
"""Framework -> its output of three steps: two prompts of two responses, 10 tokens long."""


def make_record() -> None:
    """Run `record.py` in a separate process."""
    load("benchmarks/peers/record.py").main()


def recorded(tiny: Path, folder: Path, *words: str, **job: str) -> subprocess.CompletedProcess[str]:
    sizes = {"BATCH": "2", "MINI_BATCH": "2", "SAMPLES": "2", "STEPS": "3", "GPUS": "1"}
    files = {"MODEL": f"{tiny}/model", "PROMPTS": f"{tiny}/few.parquet", "DEVICE": "cpu"}
    return run_program(make_record, *words, folder=folder, **{**JOB, **sizes, **files, **job})


@pytest.mark.parametrize("peer", WRITTEN)
def test_the_output_of_a_framework_becomes_a_row_of_our_columns(
    peer: str, tiny_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "log").write_text(WRITTEN[peer], encoding="utf-8")
    (tmp_path / "command.txt").write_text("python -m peer\n", encoding="utf-8")
    done = recorded(tiny_dir, tmp_path, peer, "log", "bench.json")
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    heading = [cell.strip() for cell in done.stdout.splitlines()[1].strip("|").split("|")]
    assert heading == list(record["columns"])
    assert record["columns"]["seconds per 1,024 prompts"] == 8.0 * 1024 / 4
    assert record["columns"]["response tokens/s"] == 2 * 40 / 8.0
    assert (record["columns"]["epochs"], record["columns"]["commit"]) == (2, "-")
    assert [step["seconds"] for step in record["steps"]] == [50.0, 3.0, 5.0]
    assert record["command"] == "python -m peer"
    if peer != "trl":
        assert all(0 < sum(s["phases"].values()) <= s["seconds"] for s in record["steps"])


def test_a_log_without_a_needed_key_is_rejected(tiny_dir: Path, tmp_path: Path) -> None:
    log = WRITTEN["verl"].replace("response_length/mean", "lengths")
    (tmp_path / "log").write_text(log, encoding="utf-8")
    done = recorded(tiny_dir, tmp_path, "verl", "log", "bench.json")
    assert done.stderr.startswith("error: log: a step has no 'response_length/mean'. verl is of a ")


def test_the_reward_is_the_same_in_every_form() -> None:
    reward = load("benchmarks/peers/reward.py")
    truths, response, prompt = ["4", "5"], "it is 4", "5 and 4?"
    scores = [reward.compute_score("", response, truth) for truth in truths]
    assert scores == [1.0, 0.0]
    rewards = reward.reward_func([prompt + response] * 2, [prompt] * 2, truths)["rewards"]
    assert rewards.tolist() == scores
    chat = [{"role": "assistant", "content": response}]
    assert reward.reward_of_chats([chat, chat], truths) == scores
