"""Run the sides of a comparison, each in a separate process with the same number of threads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

MODEL = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
"""A Qwen2 with one million parameters."""


def tokenizer_of_model() -> Any:
    """Return a tokenizer with as many tokens as `MODEL`."""
    from trainer.cli.make_tiny import make_tokenizer

    tokenizer = make_tokenizer()
    while len(tokenizer) < MODEL["vocab_size"]:
        tokenizer.add_tokens(f"<filler-{len(tokenizer)}>")
    return tokenizer


def make_llama(folder: Path, hidden: int, layers: int, **sizes: Any) -> None:
    """Write a Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=hidden, num_hidden_layers=layers, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)


def full_rows(
    num_rows: int,
    prompt: int,
    response: int,
    words: range,
    drawn: Sequence[str],
    mean_log_prob: float,
) -> dict[str, Any]:
    """Return rows without padding, with tokens among `words` and random columns `drawn`."""
    import torch

    generator = torch.Generator().manual_seed(0)
    size = num_rows, prompt + response
    ids = torch.randint(words.start, words.stop, size, generator=generator)
    ones = torch.ones_like(ids)
    columns = {
        "input_ids": ids,
        "attention_mask": ones,
        "position_ids": ones.cumsum(dim=1) - 1,
        "prompts": ids[:, :prompt].clone(),
        "responses": ids[:, prompt:].clone(),
        "response_mask": ones[:, prompt:].clone(),
    }
    for name in drawn:
        columns[name] = torch.randn(num_rows, response, generator=generator)
        if name.endswith(("log_prob", "log_probs")):
            columns[name] = 0.1 * columns[name] + mean_log_prob
    return columns


def actor_worker(policy: Any, device: str, prompt: int, response: int) -> Any:
    """Return a worker in this process for this policy section; its model is not loaded yet."""
    from types import SimpleNamespace

    from workers.config import RolloutCorrectionConfig, WorkersConfig
    from workers.roles.actor import ActorWorker

    return ActorWorker(
        WorkersConfig(
            actor_rollout_ref=policy,
            data=SimpleNamespace(max_prompt_length=prompt, max_response_length=response),
            trainer=SimpleNamespace(device=device, seed=0),
            algorithm=SimpleNamespace(rollout_correction=RolloutCorrectionConfig()),
        )
    )


def ask(python: str, *arguments: str, threads: int = 1) -> Any:
    """Return the JSON that a Python process prints last; our scripts can import this checkout."""
    environment = os.environ | dict.fromkeys(THREADS, str(threads))
    environment["TOKENIZERS_PARALLELISM"] = "false"
    if python == sys.executable:
        environment["PYTHONPATH"] = str(HERE.parent)
    done = subprocess.run(
        [python, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=3600,
        env=environment,
    )
    if done.returncode:
        sys.exit(f"{' '.join(arguments)[:200]} failed:\n{done.stderr[-3000:]}")
    # Ray may print lines after it.
    answers = [line for line in done.stdout.splitlines() if line[:1] in ("{", "[")]
    return json.loads(answers[-1] if answers else "null")
