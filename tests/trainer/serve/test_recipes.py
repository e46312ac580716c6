"""Recipes of tinker-cookbook 0.6.1, as published, against one server at the same time.

`tests/run_tinker.sh` installs the cookbook into the environment of the SDK.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.serve.clients import config_of, served
from tests.trainer.serve.test_sdk import PYTHON


def has_cookbook() -> bool:
    """Return True if the environment of the SDK has the cookbook."""
    names, folder = ("tinker_cookbook", "chz"), PYTHON.parent.parent
    return all(any(folder.glob(f"lib/python*/site-packages/{name}")) for name in names)


pytestmark = [
    pytest.mark.tinker,
    pytest.mark.skipif(not has_cookbook(), reason="the environment of the SDK has no cookbook"),
]
Metrics = dict[str, list[dict[str, Any]]]
HEAD = (
    "actor_rollout_ref.model.target_modules="
    "[q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj,lm_head]"
)


@pytest.fixture(scope="module")
def byte_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of one layer with one token per byte, and the tokens of a chat."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_only = {char: number for number, char in enumerate(alphabet)}
    inner = Tokenizer(models.BPE(vocab=bytes_only, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("bytes")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def start(command: Sequence[str], folder: Path, url: str) -> subprocess.Popen[str]:
    """Start a client of the server; its output goes to a file."""
    variables = {"HF_HUB_OFFLINE": "1", "TINKER_API_KEY": "tml-x", "TINKER_BASE_URL": url}
    folder.mkdir()
    with (folder / "output").open("w") as output:
        return subprocess.Popen(
            [str(PYTHON), *command],
            env=os.environ | variables,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )


def recipe(name: str, model: Path, folder: Path, *settings: str) -> list[str]:
    """Return the command of a recipe."""
    common = [f"model_name={model}", "renderer_name=qwen3_instruct", f"log_path={folder / 'log'}"]
    return ["-m", f"tinker_cookbook.recipes.{name}.train", *common, "eval_every=0", *settings]


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> Path:
    """Write one JSON object per line."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def chats() -> Iterator[dict[str, Any]]:
    """Chats whose replies are easy to learn."""
    for number in range(96):
        question = {"role": "user", "content": f"say {number}"}
        yield {"messages": [question, {"role": "assistant", "content": "banana " * 4}]}


def pairs() -> Iterator[dict[str, Any]]:
    """Pairs whose better reply has only the letter a, and the other one only the letter b."""
    for number in range(32):
        replies = {"A": "a" * (4 + number % 5), "B": "b" * (4 + number % 7)}
        comparison = {
            "prompt_conversation": [{"role": "user", "content": f"say {number}"}],
            **{
                f"completion_{side}": [{"role": "assistant", "content": text}]
                for side, text in replies.items()
            },
        }
        yield {"comparison": comparison, "label": "A"}


@pytest.fixture(scope="module")
def metrics(byte_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    """The metrics of each recipe's steps; all recipes run at once."""
    at, model = tmp_path_factory.mktemp("recipes"), byte_model
    chat_file, pair_file = write_rows(at / "c.jsonl", chats()), write_rows(at / "p.jsonl", pairs())
    dpo = Path(__file__).with_name("cookbook_dpo.py")
    commands = {
        "chat": recipe(
            *("chat_sl", model, at / "chat", f"dataset={chat_file}", "max_length=256"),
            *("batch_size=8", "learning_rate=1e-2", "save_every=0"),
        ),
        "arithmetic": recipe(
            *("math_rl", model, at / "arithmetic", "env=arithmetic", "group_size=8"),
            *("groups_per_batch=8", "max_tokens=32", "max_steps=12", "learning_rate=1e-2"),
            *("loss_fn=importance_sampling", "save_every=0"),
        ),
        "guess": recipe(
            *("multiplayer_rl.guess_number", model, at / "guess", "batch_size=1", "group_size=2"),
            *("max_tokens=8", "max_steps=1", "save_every=0"),
        ),
        "shorter": recipe(
            *("preference.shorter", model, at / "shorter", "batch_size=2", "group_size=4"),
            *("max_tokens=16", "max_steps=2"),
        ),
        "dpo": [str(dpo), str(model), str(pair_file), str(at / "dpo" / "log")],
    }
    lengths = ("data.max_prompt_length=2048", "data.max_response_length=128")
    with served(config_of(model, at / "saved", HEAD, *lengths, rank=32)) as (_, url):
        clients = {name: start(command, at / name, url) for name, command in commands.items()}
        try:
            codes = {name: client.wait(timeout=900) for name, client in clients.items()}
        finally:
            for client in clients.values():
                client.kill()
                client.wait()
    for name, code in codes.items():
        assert code == 0, (at / name / "output").read_text()[-3000:]
    files = {name: at / name / "log" / "metrics.jsonl" for name in commands}
    return {name: [*map(json.loads, file.read_text().splitlines())] for name, file in files.items()}


def test_chat_sl_halves_the_loss(metrics: Metrics) -> None:
    nll = [step["train_mean_nll"] for step in metrics["chat"]]
    assert nll[0] > 5
    assert min(nll) < 0.5 * nll[0]


def test_math_rl_learns_to_end_its_answers(metrics: Metrics) -> None:
    ended = [step["env/all/format"] for step in metrics["arithmetic"] if "env/all/format" in step]
    assert ended[0] < 0.2
    assert max(ended) >= 0.8


def test_guess_number_plays_ten_turns(metrics: Metrics) -> None:
    step = metrics["guess"][0]
    assert step["env/all/turns_per_episode"] == 10
    assert step["tokens/trained"] > step["env/all/total_ac_tokens"] > 0


def test_shorter_compares_samples_and_trains_on_them(metrics: Metrics) -> None:
    steps = [step for step in metrics["shorter"] if "grad_norm" in step]
    assert len(steps) == 2
    assert all(step["grad_norm"] > 0 for step in steps)
    # both log-probs of the samples are the server's: of the trainer, and of the next sampler
    assert all(abs(step["optim/kl_sample_train_v1"]) < 1e-5 for step in steps)
    assert all(step["kl_pre_post_v1"] != 0 for step in steps)


def test_dpo_learns_by_a_custom_loss(metrics: Metrics) -> None:
    losses = [step["dpo_loss"] for step in metrics["dpo"]]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-5)  # the reference is the policy
    assert losses[-1] < 0.5
    assert metrics["dpo"][-1]["accuracy"] == 1.0
