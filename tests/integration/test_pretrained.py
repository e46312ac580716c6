"""Sample, train, export, chat, evaluate and resume with a pretrained model, as users do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from examples.smollm2.make import main as make_rows
from tests import ROOT
from tests.integration.runs import lines, numbers

MODEL = Path(os.environ.get("SMOLLM2", "missing"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.is_dir(), reason="bash tests/run_real.sh gets the model"),
]
REWARD = f"reward={ROOT}/examples/smollm2/rewards.py:person"
LOCAL = ("trainer.backend=local", "trainer.n_gpus_per_node=1", "trainer.device=cpu")
QUESTIONS = """
    What is the capital of {}? Answer in one word.
    Write one sentence about {}.
    Is {} in Europe?
    Name a river in {}.
    Which language do people speak in {}?
    """
COUNTRIES = "France Italy Spain Japan Egypt Peru Norway Greece India Kenya".split()
NEW_TOKENS = 16


def command(*arguments: str, stdin: str = "") -> str:
    """Run the command `verl-like` as a user does; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", "from trainer.cli.main import main; main()", *arguments],
        **{"input": stdin, "capture_output": True, "text": True, "cwd": ROOT, "check": False},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def grpo(folder: Path, rows: Path, model: Path, *more: str) -> list[str]:
    """Return the arguments of a GRPO run of four steps."""
    return [
        *("ppo", "algorithm=grpo", f"actor_rollout_ref.model.path={model}", *LOCAL, REWARD),
        *(f"data.train_files={rows}/people_train.jsonl", "data.train_batch_size=2"),
        *("data.max_prompt_length=96", "data.max_response_length=24"),
        *("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.temperature=0.7"),
        *("actor_rollout_ref.actor.optim.lr=1e-5", "actor_rollout_ref.actor.ppo_mini_batch_size=2"),
        *("actor_rollout_ref.rollout.calculate_log_probs=true", "trainer.logger=[]"),
        *("trainer.total_training_steps=4", f"trainer.default_local_dir={folder}", *more),
    ]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    make_rows([str(folder)])
    few = (folder / "people_val.jsonl").read_text("utf-8").splitlines(keepends=True)[:8]
    (folder / "few.jsonl").write_text("".join(few), "utf-8")
    return folder


def test_greedy_answers_are_those_of_transformers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    templates = [line.strip() for line in QUESTIONS.strip().splitlines()]
    chats = [
        [{"role": "user", "content": template.format(country)}]
        for template in templates
        for country in COUNTRIES
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"prompt": c}) + "\n" for c in chats), "utf-8")
    (tmp_path / "reward.py").write_text("def none(response):\n    return 0.0\n", "utf-8")
    command(
        *(
            "eval",
            str(MODEL),
            *LOCAL,
            f"data.val_files={file}",
            f"reward={tmp_path}/reward.py:none",
        ),
        *("data.max_prompt_length=64", f"data.max_response_length={NEW_TOKENS}"),
        f"trainer.default_local_dir={tmp_path}/eval",
    )
    (samples,) = (tmp_path / "eval" / "validation").glob("*.jsonl")
    ours = [json.loads(line)["output"] for line in samples.read_text("utf-8").splitlines()]
    assert len(ours) == len(chats) == 50

    ties = []
    for chat, answer in zip(chats, ours, strict=True):
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        read = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        out = model.generate(
            **read, max_new_tokens=NEW_TOKENS, do_sample=False, output_scores=True,
            return_dict_in_generate=True, pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        theirs = tokenizer.decode(out.sequences[0, read.input_ids.shape[1] :], True)
        if theirs != answer:
            best = torch.stack(out.scores)[:, 0].topk(2).values
            gap = float((best[:, 0] - best[:, 1]).min())
            assert gap < 1e-3, (chat, answer, theirs, gap)
            ties.append((chat[0]["content"], gap))
    assert len(ties) <= 2, ties


def test_sft_then_grpo_then_export_chat_and_eval(rows: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    sft, trained, out = tmp_path / "sft", tmp_path / "grpo", tmp_path / "out"
    command(
        *("sft", f"model.path={MODEL}", *LOCAL, f"data.train_files={rows}/people_sft.jsonl"),
        *("data.max_length=128", "data.train_batch_size=16", "optim.lr=2e-5"),
        *("trainer.total_training_steps=6", "trainer.logger=[]", "trainer.save_final=true"),
        f"trainer.default_local_dir={sft}",
    )
    losses = [line["train/loss"] for line in lines(sft)]
    assert losses[-1] < 0.5 * losses[0]

    command(*grpo(trained, rows, sft / "model"))
    steps = lines(trained)
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert max(line["training/rollout_probs_diff_max"] for line in steps) < 1e-4
    assert steps[-1]["critic/score/mean"] > 0.9  # the untrained model has 0.3

    command("export", str(trained), str(out))
    tokenizer = AutoTokenizer.from_pretrained(out)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    question = json.loads((rows / "few.jsonl").read_text("utf-8").splitlines()[0])
    text = tokenizer.apply_chat_template(
        question["prompt"], tokenize=False, add_generation_prompt=True
    )
    read = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    end = tokenizer.eos_token_id
    ids = model.generate(**read, max_new_tokens=32, do_sample=False, pad_token_id=end)
    answer = tokenizer.decode(ids[0, read.input_ids.shape[1] :], skip_special_tokens=True)
    assert json.loads(answer).keys() == {"name", "age", "city"}

    reply = command("chat", str(out), "--max-tokens", "32", stdin=question["prompt"][0]["content"])
    assert reply.strip() == answer
    printed = command(
        *("eval", str(trained), f"data.val_files={rows}/few.jsonl"),
        f"trainer.default_local_dir={tmp_path}/eval",
    )
    assert "val-core/prompts/acc/mean@1" in printed


def test_a_run_that_is_killed_resumes_bit_for_bit(rows: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    command(*grpo(whole, rows, MODEL, "trainer.save_freq=-1", "trainer.save_final=false"))
    settings = grpo(broken, rows, MODEL, "trainer.save_freq=1", "trainer.max_ckpt_to_keep=1")
    run: Any = subprocess.Popen(
        [sys.executable, "-c", "from trainer.cli.main import main; main()", *settings],
        **{"cwd": ROOT, "stdout": subprocess.DEVNULL, "start_new_session": True},
    )
    deadline = time.monotonic() + 240
    while not list(broken.glob("global_step_2/commit.json")):
        assert run.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    assert len(lines(broken)) < 4
    command(*settings)
    assert numbers(broken) == numbers(whole)
