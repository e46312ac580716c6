"""The parts of `gpu.sh`, each in a process of its own, without Ray and vLLM.

    python benchmarks/gpu_side.py update|decode|step [--device cuda|cpu] [--tiny]

update: packed rows through a Qwen2 of 0.5B, computed in bfloat16 from float32 weights.
decode: 64 samples of the native engine, in bfloat16.
step: two GRPO steps of the whole program on `trainer.backend=local`.

Rates stand beside what an H200 can do: 790 TFLOP/s in bfloat16 products, 4300 GB/s of memory.
"""

from __future__ import annotations

import argparse
import math
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
TFLOPS, GB_PER_S = 790, 4300
QWEN2_HALF_B = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
TINY = {"vocab_size": 512, "hidden_size": 112, "intermediate_size": 256, "num_hidden_layers": 2}


def seconds_of(run: Callable[[], Any], device: str, repeats: int) -> float:
    """The median of some runs after one to warm up."""
    taken = []
    for _ in range(repeats + 1):
        began = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def make_model(folder: Path, tiny: bool) -> Any:
    """A Qwen2 of random weights; returns its configuration."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(**QWEN2_HALF_B | (TINY if tiny else {}), pad_token_id=0)
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return config


def rows_of(num_rows: int, prompt: int, response: int, vocabulary: int) -> Any:
    """Rows of unequal length with all that an update of the actor reads."""
    from verl_like.batch.protocol import DataProto

    lengths = torch.randint(response // 2, response + 1, (num_rows, 1))
    inside = (torch.arange(response) < lengths).long()
    mask = torch.cat([torch.ones(num_rows, prompt, dtype=torch.long), inside], dim=1)
    ids = torch.randint(1, vocabulary, mask.shape) * mask
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
            "responses": ids[:, prompt:].clone(),
            "response_mask": inside,
            "old_log_probs": torch.full(inside.shape, -math.log(vocabulary)),
            "advantages": torch.randn(num_rows, 1) * inside,
        }
    )


def update(device: str, tiny: bool, folder: Path) -> None:
    """Achieved TFLOP/s of the actor's update, by the operations that its rows need."""
    from types import SimpleNamespace

    from workers.config import (
        ActorRolloutRefConfig,
        ModelConfig,
        RolloutCorrectionConfig,
        WorkersConfig,
    )
    from workers.roles.actor import ActorWorker
    from workers.training.mfu import needed_flops

    vocabulary = make_model(folder, tiny).vocab_size
    num_rows, prompt, response = (8, 16, 16) if tiny else (64, 256, 768)
    model = ModelConfig(path=str(folder), compute_dtype="bfloat16")
    policy = ActorRolloutRefConfig(model=model)
    policy.actor.ppo_mini_batch_size = num_rows
    policy.actor.use_dynamic_bsz = True
    policy.actor.ppo_max_token_len_per_gpu = 64 if tiny else 16384
    algorithm = SimpleNamespace(rollout_correction=RolloutCorrectionConfig())
    worker = ActorWorker(
        WorkersConfig(
            actor_rollout_ref=policy,
            data=None,
            trainer=SimpleNamespace(device=device),
            algorithm=algorithm,
        )
    )
    worker.init_model(100)
    data = rows_of(num_rows, prompt, response, vocabulary)
    seconds = seconds_of(lambda: worker.update_actor(data), device, 1 if tiny else 5)
    rate = needed_flops(worker.engine, data, True) / seconds / 1e12
    tokens = int(data.batch["attention_mask"].sum())
    print(
        f"update: {tokens} tokens in {seconds:.3f} s, {tokens / seconds:,.0f} tokens/s, "
        f"{rate:.4g} TFLOP/s of {TFLOPS} ({rate / TFLOPS:.2%})"
    )


def decode(device: str, tiny: bool, folder: Path) -> None:
    """Achieved GB/s of decoding 64 samples: weights and the cache so far, read at every token."""
    from transformers import AutoModelForCausalLM

    from workers.rollout.base import EngineLimits, SamplingParams
    from workers.rollout.native.engine import NativeEngine
    from workers.rollout.sample import Sample

    config = make_model(folder, tiny)
    prompt, response = (8, 8) if tiny else (128, 512)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    engine = NativeEngine(module, EngineLimits(prompt, response), owns_weights=False)
    engine.commit(0)
    ids = torch.randint(1, config.vocab_size, (64, prompt)).tolist()
    requests = [Sample(row, key) for key, row in enumerate(ids)]
    sampling = SamplingParams(max_tokens=response, stop_token_ids=())
    seconds = seconds_of(lambda: engine.generate(requests, sampling), device, 1 if tiny else 3)

    weights = sum(weight.nbytes for weight in module.parameters())
    head_size = config.hidden_size // config.num_attention_heads
    a_token = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size * 2
    read = response * (weights + 64 * a_token * (prompt + response / 2))
    rate = read / seconds / 1e9
    print(
        f"decode: 64 x {response} tokens in {seconds:.3f} s, {64 * response / seconds:,.0f} "
        f"tokens/s, {rate:.4g} GB/s of {GB_PER_S} ({rate / GB_PER_S:.2%})"
    )


def step(device: str, tiny: bool, folder: Path) -> None:
    """The whole program: two GRPO steps in this process, on the toy task."""
    from trainer import load_config, run

    runpy.run_path(str(ROOT / "examples/tiny/make.py"))["make"](folder)
    size = 8 if tiny else 64
    began = time.perf_counter()
    run(
        load_config(
            [
                f"data.train_files={folder}/train.parquet",
                f"actor_rollout_ref.model.path={folder}/model",
                f"data.train_batch_size={size}",
                f"actor_rollout_ref.actor.ppo_mini_batch_size={size}",
                "data.max_prompt_length=48",
                "data.max_response_length=16",
                "algorithm.adv_estimator=grpo",
                "actor_rollout_ref.rollout.n=4",
                "trainer.backend=local",
                f"trainer.device={device}",
                "trainer.n_gpus_per_node=1",
                "trainer.total_training_steps=2",
                "trainer.logger=[console]",
                f"trainer.default_local_dir={folder}/run",
            ]
        )
    )
    seconds = time.perf_counter() - began
    heavy = [name for name in ("ray", "vllm") if sys.modules.get(name) is not None]
    print(f"step: two GRPO steps in {seconds:.1f} s; imported of Ray and vLLM: {heavy}")


def main() -> None:
    """One part, in a folder that is gone afterwards."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("update", "decode", "step"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    chosen = parser.parse_args()
    if chosen.device == "cuda":
        print(f"on {torch.cuda.get_device_name(0)}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        {"update": update, "decode": decode, "step": step}[chosen.part](
            chosen.device, chosen.tiny, Path(folder)
        )


if __name__ == "__main__":
    main()
