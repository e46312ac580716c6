"""The probes of `verl-like doctor`, each in its own process.

`python -m trainer.cli.probes NAME` prints what works. A probe that fails ends with an error, whose
last line names the problem.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from trainer.cli.make_tiny import make_model, make_tokenizer


def torch() -> str:
    """Name torch's version and the GPUs, and report whether torch has NCCL."""
    import torch
    import torch.distributed as dist

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if not gpus:
        return f"torch {torch.__version__}; GPUs: none, roles run on the CPU"
    nccl = "with" if dist.is_nccl_available() else "WITHOUT"
    return f"torch {torch.__version__}; GPUs: {', '.join(gpus)}, {nccl} nccl"


def local() -> str:
    """Generate a token with a tiny model in this process."""
    return _generate("local", 1)


def ray() -> str:
    """Generate a token with a tiny model in two processes of a Ray cluster on this machine."""
    return _generate("ray", 2)


def fsdp(device: str = "cuda") -> str:
    """Take one step of a tiny model that FSDP shards over two ranks, in processes of Ray."""
    from trainer import load_config, run
    from trainer.sft.recipe import SFT

    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer()
        make_model(tokenizer).save_pretrained(f"{folder}/model")
        tokenizer.save_pretrained(f"{folder}/model")
        rows = Path(folder) / "rows.jsonl"
        rows.write_text('{"prompt": "say a", "response": "aa"}\n' * 2, encoding="utf-8")
        settings = [
            f"trainer.device={device}",
            "trainer.n_gpus_per_node=2",
            f"trainer.default_local_dir={folder}/run",
            "trainer.total_training_steps=1",
            "trainer.logger=[]",
            f"model.path={folder}/model",
            f"data.train_files={rows}",
            "data.train_batch_size=2",
            "data.max_length=32",
        ]
        (metrics,) = run(load_config(settings, SFT)).metrics
    seconds = time.perf_counter() - began
    return (
        f"an FSDP step on two ranks ({device}): loss {metrics['train/loss']:.3f}, {seconds:.1f} s"
    )


def _generate(backend: str, num_processes: int) -> str:
    """Sync the weights of a tiny model once from actor to rollout; then generate one token."""
    import torch

    from trainer import WorkerGroups, load_config
    from verl_like import DataProto
    from workers.weights.sync import sync_weights

    torch.set_num_threads(1)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        make_model(make_tokenizer()).save_pretrained(Path(folder) / "model")
        settings = [
            f"trainer.backend={backend}",
            "trainer.device=cpu",
            f"trainer.n_gpus_per_node={num_processes}",
            f"trainer.default_local_dir={folder}",
            f"actor_rollout_ref.model.path={folder}/model",
            "algorithm.adv_estimator=reinforce_plus_plus",
            "data.max_prompt_length=4",
            "data.max_response_length=1",
            "data.train_files=none",
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
                "sample_index": torch.zeros(1, dtype=torch.int64),
            }
            ends = {"eos_token_id": 0, "pad_token_id": 0}
            batch = DataProto.from_dict(columns, {"uid": ["0-0"]}, ends)
            groups["rollout"].generate_sequences(batch)

    seconds = time.perf_counter() - began
    return f"weight sync and generation ran in {seconds:.1f} s"


def vllm() -> str:
    """Start a vLLM engine, send it weights, and generate one token."""
    import torch

    from workers.rollout.vllm.engine import check_vllm

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make_model(make_tokenizer()).save_pretrained(folder)
        return check_vllm(folder)


def flash_attention() -> str:
    """Compare flash-attn's kernel with torch's; without a GPU, only import it.

    A build for another torch fails at the import.
    """
    import importlib

    import torch

    flash: Any = importlib.import_module("flash_attn")

    if not torch.cuda.is_available():
        return f"flash-attn {flash.__version__} loads; it runs on GPUs only, and there is none"
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
    "local": local,
    "ray": ray,
    "fsdp": fsdp,
    "vllm": vllm,
    "flash_attention": flash_attention,
}

if __name__ == "__main__":
    print(PROBES[sys.argv[1]]())
