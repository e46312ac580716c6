"""Compare a token head of 150k tokens in chunks with whole logits: peak memory and seconds.

    python benchmarks/bench_lm_head.py [--rounds 3] [--small]

Both sides are actors with a one-layer Qwen2 with tied embeddings. They score the same rows and then
train on them, in one pass. Each side runs in its own process with one thread, one after the other.
Memory is the growth of the process's peak. `--small` takes a second instead of a minute, for tests.
Prints JSON with medians over the rounds, and the differences between the two sides' results.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
PROMPT = 8
SIZES = {"whole": (151_936, 512, 8), "small": (4096, 256, 2)}
"""Vocabulary size, response tokens, rows."""
HIDDEN = 256


def make_model(folder: Path, vocabulary: int) -> None:
    """Write random weights that are large enough to give tokens different probabilities."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def make_rows(vocabulary: int, length: int, count: int) -> Any:
    """Return full rows of random tokens."""
    from verl_like import DataProto

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (count, PROMPT + length), generator=generator)
    ones = torch.ones_like(ids)
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": ones,
            "position_ids": ones.cumsum(1) - 1,
            "responses": ids[:, PROMPT:].clone(),
            "response_mask": ones[:, PROMPT:].clone(),
            "advantages": torch.randn(count, length, generator=generator),
        }
    )


def make_actor(folder: Path, rows: Any, in_chunks: bool) -> Any:
    """Return an actor that takes all rows in one pass, with an entropy bonus."""
    from workers.config import (
        ActorRolloutRefConfig,
        ModelConfig,
        RolloutCorrectionConfig,
        WorkersConfig,
    )
    from workers.roles.actor import ActorWorker

    model = ModelConfig(path=str(folder), use_fused_kernels=in_chunks)
    policy = ActorRolloutRefConfig(model=model)
    policy.actor.ppo_mini_batch_size = len(rows)
    policy.actor.use_dynamic_bsz = False
    policy.actor.ppo_micro_batch_size_per_gpu = len(rows)
    policy.rollout.log_prob_micro_batch_size_per_gpu = len(rows)
    policy.actor.entropy_coeff = 0.01
    algorithm = SimpleNamespace(rollout_correction=RolloutCorrectionConfig())
    config = WorkersConfig(actor_rollout_ref=policy, data=None, trainer=None, algorithm=algorithm)
    actor = ActorWorker(config)
    actor.init_model(1)
    return actor


def measured(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return the result, the seconds, and the MiB by which the process's peak memory grew."""
    before, began = peak_mib(), time.perf_counter()
    result = work()
    return result, time.perf_counter() - began, peak_mib() - before


def peak_mib() -> float:
    """Return the peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def run_side(folder: Path, size: str, in_chunks: bool) -> dict[str, float]:
    """Measure one side, in this process."""
    from workers.training import lm_head

    if size == "small":
        lm_head.CHUNK_BYTES = 2**20
    vocabulary, length, count = SIZES[size]
    rows = make_rows(vocabulary, length, count)
    actor = make_actor(folder, rows, in_chunks)
    actor.compute_log_prob(rows[:1])  # kernels and tables that are built only once

    (scored, _), score_s, score_mib = measured(lambda: actor.compute_log_prob(rows))
    rows = rows.union(scored)
    metrics, update_s, update_mib = measured(lambda: actor.update_actor(rows))
    return {
        "score_s": score_s,
        "score_peak_mib": score_mib,
        "update_s": update_s,
        "score_and_update_peak_mib": score_mib + update_mib,
        "log_prob_sum": float(scored.batch["old_log_probs"].double().sum()),
        "entropy": metrics["actor/entropy"],
        "grad_norm": metrics["actor/grad_norm"],
    }


def start_side(folder: Path, size: str, side: str) -> dict[str, float]:
    """Run `run_side` in a new process."""
    one_thread = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, "--folder", str(folder), "--size", size, "--side", side]
    done = subprocess.run(
        command, env=os.environ | one_thread, stdout=subprocess.PIPE, text=True, check=True
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def compare(size: str, num_rounds: int) -> dict[str, float]:
    """Return the medians of both sides, and the differences of their results."""
    vocabulary, length, count = SIZES[size]
    results: dict[str, list[dict[str, float]]] = {"chunks": [], "whole": []}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), vocabulary)
        for _ in range(num_rounds):
            for side, figures in results.items():
                figures.append(start_side(Path(folder), size, side))

    report = {"logits_mib": vocabulary * length * count * 4 / 2**20}
    for side, figures in results.items():
        for name in ("score_s", "score_peak_mib", "update_s", "score_and_update_peak_mib"):
            report[f"{side}, {name}"] = statistics.median(
                round_figures[name] for round_figures in figures
            )
    for name in ("log_prob_sum", "entropy", "grad_norm"):
        chunked, whole = (results[side][0][name] for side in ("chunks", "whole"))
        report[f"{name}, apart"] = abs(chunked - whole) / abs(whole)
    return report


def main() -> None:
    """Parse the command line; print a JSON object on the last lines of stdout."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="small sizes, for a test")
    for name in ("--folder", "--size", "--side"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()

    if args.side:
        torch.set_num_threads(1)
        print(json.dumps(run_side(Path(args.folder), args.size, args.side == "chunks")))
        return
    report = compare("small" if args.small else "whole", 1 if args.small else args.rounds)
    print(json.dumps({name: float(f"{value:.4g}") for name, value in report.items()}, indent=1))


if __name__ == "__main__":
    main()
