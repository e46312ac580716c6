"""Models of Qwen2.5's sizes with random weights, and the updates that are predicted and measured.

A GPU runs them for `gpu.sh`, and the meta device for the roofline.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sides import actor_worker, full_rows

QWEN2 = {
    "0.5b": (896, 4864, 24, 14, 2, True),
    "1.5b": (1536, 8960, 28, 12, 2, True),
    "7b": (3584, 18944, 28, 28, 4, False),
    "tiny": (128, 256, 2, 4, 2, True),
}
"""Hidden size, MLP size, layers, heads, key heads, whether the head is tied."""
VOCABULARY = 151936
TINY_VOCABULARY = 512
CACHE_GIB = 16
"""Room for 256 rows of 0.5B with 1,024 + 512 tokens, so that all of them decode at once."""
MAX_WORDS = 8192
"""Entries of the tokenizer; it cannot decode most of the tokens that a random model samples."""
NUM_PROMPTS = 256


@dataclass(frozen=True)
class Job:
    """An update of an actor, or its log-probs."""

    size: str
    rows: int = 32
    prompt: int = 256
    response: int = 768
    tokens: int = 16384
    compiled: bool = False
    recomputes: bool | int = True
    """True if all layers are recomputed in the backward pass, or the number of layers."""
    same_prompts: int = 1
    """Rows that have the same prompt."""
    shares: bool = True
    layers: int = 0
    """Layers instead of the model's own number."""
    mini_batches: int = 1


def config_of(size: str, num_layers: int = 0) -> Any:
    """Return the configuration of a Qwen2, with its own number of layers by default."""
    from transformers import Qwen2Config

    width, mlp, layers, heads, key_heads, tied = QWEN2[size]
    return Qwen2Config(
        vocab_size=TINY_VOCABULARY if size == "tiny" else VOCABULARY,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=num_layers or layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        dtype="bfloat16",
    )


def actor_of(folder: Path, job: Job, device: str) -> Any:
    """Return the actor of a job, which computes in bfloat16; its model is not built yet."""
    from workers.config import ActorRolloutRefConfig, ModelConfig, OptimConfig, RolloutConfig

    config_of(job.size, job.layers).save_pretrained(folder / job.size)
    model = ModelConfig(
        path=str(folder / job.size),
        random_init_seed=0,
        compute_dtype="bfloat16",
        compile="on" if job.compiled else "off",
        enable_gradient_checkpointing=job.recomputes,
        share_prefixes=job.shares,
    )
    policy = ActorRolloutRefConfig(model=model, rollout=RolloutConfig(n=1))
    policy.actor.optim = OptimConfig(lr=1e-5)
    policy.actor.ppo_mini_batch_size = job.rows // job.mini_batches
    policy.actor.use_dynamic_bsz = True
    policy.actor.ppo_max_token_len_per_gpu = job.tokens
    return actor_worker(policy, device, job.prompt, job.response)


def rows_of(job: Job) -> Any:
    """Return the rows of a job, with every column that an update reads."""
    from verl_like.batch.protocol import DataProto

    words = range(6, TINY_VOCABULARY if job.size == "tiny" else 150_000)
    drawn = "advantages", "old_log_probs"
    columns = full_rows(job.rows, job.prompt, job.response, words, drawn, -12)
    for name in ("input_ids", "prompts"):
        prompts = columns[name][:, : job.prompt].view(-1, job.same_prompts, job.prompt)
        prompts[:] = prompts[:, :1].clone()
    return DataProto.from_dict(columns)


def write_model(folder: Path, size: str, longest: int) -> None:
    """Write a model's folder without weights, and prompts of up to `longest` tokens."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from trainer.cli.make_tiny import CHARACTERS, SPECIAL, make_tokenizer

    config = config_of(size)
    num_words = min(config.vocab_size, MAX_WORDS) - len(SPECIAL) - len(CHARACTERS)
    tokenizer = make_tokenizer((*CHARACTERS, *(f" w{number}" for number in range(num_words))))
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    config.save_pretrained(folder / size)
    tokenizer.save_pretrained(folder / size)
    pq.write_table(pa.Table.from_pylist(prompts(longest)), folder / "prompts.parquet")


def prompts(longest: int) -> list[dict[str, Any]]:
    """Return rows in verl's schema. A character is a token; the chat template adds three tokens."""
    rng = random.Random(0)
    rows = []
    for _ in range(NUM_PROMPTS):
        text = "".join(rng.choices("abcdefgh ", k=rng.randint(longest // 2, longest - 4)))
        rows.append(
            {
                "data_source": "gpu",
                "prompt": [{"role": "user", "content": text}],
                "reward_model": {"style": "rule", "ground_truth": ""},
            }
        )
    return rows
