"""Recipes of tinker-cookbook 0.6.1, as published, against a server; minutes each.

`bash tests/run_tinker.sh -m "tinker and slow"` runs them where the environment of the SDK has the
cookbook: `pip install --no-deps tinker-cookbook==0.6.1`, and then the packages that it imports
(blobfile chz datasets math-verify pillow pylatexenc pyrage sympy termcolor tiktoken tqdm). Its
dependency tml-renderers is not on every index, and none of these recipes imports it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.serve.clients import config_of, served
from tests.trainer.serve.test_sdk import PYTHON


def has_cookbook() -> bool:
    """Whether the environment of the SDK has the cookbook."""
    found = PYTHON.parent.parent.glob("lib/python*/site-packages/tinker_cookbook/__init__.py")
    return any(found)


pytestmark = [
    pytest.mark.tinker,
    pytest.mark.slow,
    pytest.mark.skipif(not has_cookbook(), reason="the environment of the SDK has no cookbook"),
]
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
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("bytes")
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def run_recipe(name: str, model: Path, folder: Path, *settings: str) -> list[dict[str, Any]]:
    """The metrics of a recipe's steps."""
    lengths = ("data.max_prompt_length=512", "data.max_response_length=128")
    with served(config_of(model, folder / "saved", HEAD, *lengths, rank=32)) as (_, url):
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "TINKER_API_KEY": "tml-x",
            "TINKER_BASE_URL": url,
        }
        command = [str(PYTHON), "-m", f"tinker_cookbook.recipes.{name}", f"model_name={model}"]
        command += ["renderer_name=qwen3_instruct", f"log_path={folder / 'log'}", *settings]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=900, cwd=folder
        )
        assert done.returncode == 0, done.stderr[-2000:]
    lines = (folder / "log" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_chat_sl_learns(byte_model: Path, tmp_path: Path) -> None:
    (package,) = PYTHON.parent.parent.glob("lib/python*/site-packages/tinker_cookbook")
    rows = package / "example_data" / "conversations.jsonl"
    settings = ("batch_size=8", "learning_rate=1e-2", "eval_every=0", "save_every=0")
    metrics = run_recipe(
        "chat_sl.train", byte_model, tmp_path, f"dataset={rows}", "max_length=512", *settings
    )
    nll = [line["train_mean_nll"] for line in metrics]
    assert nll[0] > 5
    assert min(nll) < 0.7 * nll[0]


def test_arithmetic_learns_to_end_its_answers(byte_model: Path, tmp_path: Path) -> None:
    settings = ("group_size=8", "groups_per_batch=8", "max_tokens=32", "max_steps=16")
    more = ("learning_rate=1e-2", "loss_fn=importance_sampling", "eval_every=0", "save_every=0")
    metrics = run_recipe("math_rl.train", byte_model, tmp_path, "env=arithmetic", *settings, *more)
    ended = [line["env/all/format"] for line in metrics if "env/all/format" in line]
    assert ended[0] < 0.2
    assert max(ended) >= 0.8
