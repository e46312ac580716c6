"""A rank of the comparison of `bench_parallel.py`: an update of long rows, on one thread.

    python benchmarks/parallel_side.py FOLDER AXES TOKENS ROWS REPEATS

AXES are those of `parallel`, as in `sp=2`, or empty. Under torchrun's environment it is a rank of
several. Prints seconds of an update and the peak memory of the process as JSON.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from typing import Any

import torch

PROMPT, VOCABULARY = 8, 64


def long_rows(num_rows: int, num_tokens: int) -> Any:
    """Rows of so many tokens, with every column that an update reads."""
    from verl_like.batch.protocol import DataProto

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (num_rows, num_tokens), generator=generator)
    ones = torch.ones_like(ids)
    columns = {
        "input_ids": ids,
        "attention_mask": ones,
        "position_ids": ones.cumsum(dim=1) - 1,
        "prompts": ids[:, :PROMPT].clone(),
        "responses": ids[:, PROMPT:].clone(),
        "response_mask": ones[:, PROMPT:].clone(),
    }
    for name in ("advantages", "old_log_probs"):
        columns[name] = torch.randn(num_rows, num_tokens - PROMPT, generator=generator)
    columns["old_log_probs"] = 0.1 * columns["old_log_probs"] - 4.0
    return DataProto.from_dict(columns)


def main(folder: str, axes: str, num_tokens: int, num_rows: int, repeats: int) -> None:
    """Time an update of micro-batches of one row."""
    from tests.workers.samples import tiny_config
    from verl_like.batch.split import split_rows
    from workers.config import ParallelConfig
    from workers.parallel import sharding
    from workers.roles.actor import ActorWorker

    sharding.NOT_YET = {}  # the rows are dealt here
    torch.set_num_threads(1)
    sizes = dict(part.split("=") for part in axes.split(",") if part)
    parallel = ParallelConfig(**{name: int(size) for name, size in sizes.items()})
    config = tiny_config(folder, ppo_mini_batch_size=num_rows, parallel=parallel)
    config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = 1
    actor = ActorWorker(config)
    actor.init_model(10)
    dims = actor.engine.dims
    data = split_rows(long_rows(num_rows, num_tokens), dims.data_size)[dims.data_rank(actor.rank)]

    actor.update_actor(data)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        actor.update_actor(data)
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": statistics.median(seconds or [0.0]), "peak_mib": peak}))


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:6]))
