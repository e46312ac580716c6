"""One rank of `bench_parallel.py`: calls on long rows, on one thread.

    python benchmarks/parallel_side.py FOLDER AXES update|log_prob TOKENS ROWS REPEATS

AXES are axes of `parallel`, such as `sp=2`, or empty. With torchrun's environment variables, it is
one of several ranks. Prints the seconds of a call, the peak memory of the process, and its memory
before the first call, as JSON. A log-prob pass computes all logits at once.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from typing import Any

import torch
from sides import full_rows

PROMPT, VOCABULARY = 8, 64


def long_rows(num_rows: int, num_tokens: int) -> Any:
    """Return rows of `num_tokens` tokens, with every column that an update reads."""
    from verl_like.batch.protocol import DataProto

    sizes, drawn = (num_rows, PROMPT, num_tokens - PROMPT), ("advantages", "old_log_probs")
    return DataProto.from_dict(full_rows(*sizes, range(1, VOCABULARY), drawn, -4.0))


def peak_mib() -> float:
    """Return the peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(folder: str, axes: str, call: str, num_tokens: int, num_rows: int, repeats: int) -> None:
    """Time a call with micro-batches of one row."""
    from tests.workers.samples import tiny_config
    from verl_like.batch.split import split_rows
    from verl_like.process.info import OWN_PROCESS
    from workers.config import ParallelConfig
    from workers.roles.actor import ActorWorker

    torch.set_num_threads(1)
    os.environ[OWN_PROCESS] = "1"  # as in the processes of a run, whatever their number
    sizes = dict(part.split("=") for part in axes.split(",") if part)
    parallel = ParallelConfig(**{name: int(size) for name, size in sizes.items()})
    config = tiny_config(folder, ppo_mini_batch_size=num_rows, parallel=parallel)
    config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 1
    config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu = 1
    config.actor_rollout_ref.model.use_fused_kernels = call == "update"
    actor = ActorWorker(config)
    actor.init_model(10)
    dims = actor.engine.dims
    data = split_rows(long_rows(num_rows, num_tokens), dims.data_size)[dims.data_rank(actor.rank)]

    run = actor.update_actor if call == "update" else actor.compute_log_prob
    before = peak_mib()
    run(data)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run(data)
        seconds.append(time.perf_counter() - start)
    results = {"seconds": statistics.median(seconds or [0.0]), "peak_mib": peak_mib()}
    print(json.dumps({**results, "before_mib": before, "needs_mib": peak_mib() - before}))


if __name__ == "__main__":
    main(*sys.argv[1:4], *map(int, sys.argv[4:7]))
