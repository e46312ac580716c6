"""An update and a decode of one device, each in a process of its own, without Ray and vLLM.

    python benchmarks/gpu_side.py update|decode MODEL [--device cuda|cpu] [--tiny] [--out FILE]

update: packed rows through the actor in bfloat16, with recomputation, from float32 weights.
decode: 64 samples of the native engine, in bfloat16.
machine: what the machine is, without a model.

Rates stand beside what the card's data sheet promises (`trainer/planner/devices.py`).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

FLASH = ("flash_attn", "flash_attn_interface")
"""Packages of FlashAttention: 2 and 4, and 3."""
Figures = dict[str, float | str]


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


def update(model: Path, chosen: argparse.Namespace) -> Figures:
    """The actor's update: operations that its rows need, over those that the card can do."""
    from types import SimpleNamespace

    from workers.config import (
        ActorRolloutRefConfig,
        ModelConfig,
        RolloutCorrectionConfig,
        WorkersConfig,
    )
    from workers.models.hf_config import read_hf_config
    from workers.roles.actor import ActorWorker
    from workers.training.mfu import needed_flops, peak_flops

    if chosen.attention == "torch":
        sys.modules.update(dict.fromkeys(FLASH))  # not to be imported: torch's own kernel is next
    num_rows, prompt, response = (8, 16, 16) if chosen.tiny else (32, 256, 768)
    settings = ModelConfig(
        path=str(model), compute_dtype="bfloat16", enable_gradient_checkpointing=True
    )
    policy = ActorRolloutRefConfig(model=settings)
    policy.actor.strategy = chosen.strategy
    policy.actor.ppo_mini_batch_size = num_rows
    policy.actor.use_dynamic_bsz = True
    policy.actor.ppo_max_token_len_per_gpu = 64 if chosen.tiny else 16384
    algorithm = SimpleNamespace(rollout_correction=RolloutCorrectionConfig())
    worker = ActorWorker(
        WorkersConfig(
            actor_rollout_ref=policy,
            data=None,
            trainer=SimpleNamespace(device=chosen.device),
            algorithm=algorithm,
        )
    )
    worker.init_model(100)
    data = rows_of(num_rows, prompt, response, read_hf_config(str(model)).vocab_size)
    seconds = seconds_of(lambda: worker.update_actor(data), chosen.device, 1 if chosen.tiny else 5)
    tokens = int(data.batch["attention_mask"].sum())
    rate = needed_flops(worker.engine, data, True) / seconds
    kernel = worker.engine.kernel
    found: Figures = {
        "attention": kernel.name if kernel else "no varlen kernel",
        "seconds": seconds,
        "tokens a second": tokens / seconds,
        "TFLOP/s": rate / 1e12,
    }
    peak = peak_flops(torch.device(chosen.device))
    return found | of_the_card("MFU", rate, peak) | memory_of(chosen.device)


def decode(model: Path, chosen: argparse.Namespace) -> Figures:
    """64 samples: bytes of weights and of the cache so far, which every token reads."""
    from gpu_models import decoded_bytes
    from transformers import AutoModelForCausalLM

    from trainer.planner.devices import data_sheet
    from workers.rollout.base import EngineLimits, SamplingParams
    from workers.rollout.native.engine import NativeEngine
    from workers.rollout.sample import Sample

    rows, prompt, response = (64, 8, 8) if chosen.tiny else (64, 128, 512)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    module = module.to(chosen.device).eval()
    engine = NativeEngine(module, EngineLimits(prompt, response), owns_weights=False)
    engine.commit(0)
    ids = torch.randint(1, module.config.vocab_size, (rows, prompt)).tolist()
    requests = [Sample(row, key) for key, row in enumerate(ids)]
    sampling = SamplingParams(max_tokens=response, stop_token_ids=())
    seconds = seconds_of(
        lambda: engine.generate(requests, sampling), chosen.device, 1 if chosen.tiny else 3
    )
    rate = decoded_bytes(model, rows, prompt, response) / seconds
    found: Figures = {
        "seconds": seconds,
        "tokens a second": rows * response / seconds,
        "GB/s": rate / 1e9,
    }
    card = data_sheet(torch.cuda.get_device_name()) if chosen.device == "cuda" else None
    return found | of_the_card("of bandwidth", rate, card and card.memory)


def machine(model: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """What the figures are of."""
    from trainer.cli.job_record import commit_of, machine_facts, versions

    return machine_facts() | {"versions": versions(), "commit": commit_of("verl-like")}


def of_the_card(name: str, rate: float, peak: float | None) -> Figures:
    """The share of what is promised; nothing where nobody has promised anything."""
    return {name: rate / peak} if peak and math.isfinite(peak) else {}


def memory_of(device: str) -> Figures:
    """The most that was allocated."""
    return {"peak GiB": torch.cuda.max_memory_allocated() / 2**30} if device == "cuda" else {}


def main() -> None:
    """One part; its figures go into a file, too."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--attention", choices=("auto", "torch"), default="auto")
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    found = PARTS[chosen.part](chosen.model, chosen)
    if chosen.out:
        chosen.out.write_text(json.dumps(found), encoding="utf-8")
    print(json.dumps(found))


PARTS = {"update": update, "decode": decode, "machine": machine}

if __name__ == "__main__":
    main()
