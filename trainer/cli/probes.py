"""The probes of `verl-like doctor`, each in a process of its own.

`python -m trainer.cli.probes NAME` prints what works. A probe that fails ends with the error, whose
last line says what is wrong.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from trainer.cli.make_tiny import make_model, make_tokenizer


def torch() -> str:
    """One gloo all-reduce between two processes."""
    import torch
    import torch.distributed as dist
    from torch.multiprocessing import get_context

    with tempfile.TemporaryDirectory() as folder:
        other = get_context("spawn").Process(target=_join, args=(1, f"{folder}/store"))
        other.start()
        total = _join(0, f"{folder}/store")
        other.join(30)
    if total != 3.0 or other.exitcode != 0:
        raise RuntimeError(
            f"1 + 2 over gloo gave {total}, the other process ended with {other.exitcode}"
        )
    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    nccl = "" if not cards else ", nccl" if dist.is_nccl_available() else ", NO nccl"
    return (
        f"two processes added up over gloo{nccl}; cards: "
        f"{', '.join(cards) or 'none, roles run on the CPU'}"
    )


def _join(rank: int, store: str) -> float:
    import torch.distributed as dist
    from torch import tensor

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    total = tensor(float(rank + 1))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


def ray() -> str:
    """A cluster on this machine, one call of a worker in it."""
    from verl_like.backends.ray import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        connect,
    )
    from verl_like.process.worker import Worker

    began = time.perf_counter()
    connect(num_cpus=1, logging_level=logging.ERROR)
    started = time.perf_counter() - began
    group: Any = RayWorkerGroup(RayResourcePool([1], use_gpu=False), RayClassWithInitArgs(Worker))
    answer = group.execute_func_rank_zero.remote(os.getpid).get(timeout=30)
    return f"started a cluster in {started:.1f} s and called process {answer}"


def rollout() -> str:
    """A tiny model: its weights synced once from actor to rollout, then one token."""
    import torch

    from trainer import WorkerGroups, load_config
    from verl_like import DataProto
    from workers.weights.sync import sync_weights

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(make_tokenizer()).save_pretrained(Path(folder) / "model")
        settings = [
            f"actor_rollout_ref.model.path={folder}/model",
            f"trainer.default_local_dir={folder}",
            "algorithm.adv_estimator=reinforce_plus_plus",
            "data.max_prompt_length=4",
            "data.max_response_length=1",
            "data.train_files=none",
            "trainer.backend=local",
        ]

        with WorkerGroups(load_config(settings)) as groups:
            groups["actor"].init_model(total_steps=1)
            groups["rollout"].init_model()
            sync_weights(groups["actor"], groups["rollout"], 1)

            tokens = torch.tensor([[1, 2, 3, 4]])
            columns = {
                "input_ids": tokens,
                "attention_mask": torch.ones_like(tokens),
                "position_ids": tokens - 1,
            }
            batch = DataProto.from_dict(
                {**columns, "sample_index": torch.zeros(1, dtype=torch.int64)}, {"uid": ["0-0"]}
            )
            batch.meta_info = {"eos_token_id": 0, "pad_token_id": 0}
            token = int(groups["rollout"].generate_sequences(batch).batch["responses"][0, 0])

    return f"synced one version of the weights, then generated token {token}"


def vllm() -> str:
    """An engine of vLLM's: takes weights, generates one token."""
    import torch

    from workers.rollout.vllm.engine import check_vllm

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(make_tokenizer()).save_pretrained(folder)
        return check_vllm(folder)


def flash_attention() -> str:
    """flash-attn's kernel beside torch's own; without a card, its import alone.

    A build for another torch fails at the import.
    """
    import importlib

    import torch

    flash: Any = importlib.import_module("flash_attn")

    if not torch.cuda.is_available():
        return f"flash-attn {flash.__version__} loads; it runs on cards only, and there is none"
    query, key, value = torch.randn(3, 1, 8, 2, 64, dtype=torch.bfloat16, device="cuda")
    rows = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    plain = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(
        flash.flash_attn_func(query, key, value, causal=True), plain, atol=0.02, rtol=0.02
    )
    return (
        f"flash-attn {flash.__version__} agrees with torch's attention on "
        f"{torch.cuda.get_device_name()}"
    )


PROBES = {
    "torch": torch,
    "ray": ray,
    "rollout": rollout,
    "vllm": vllm,
    "flash_attention": flash_attention,
}

if __name__ == "__main__":
    print(PROBES[sys.argv[1]]())
