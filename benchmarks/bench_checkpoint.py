"""Measure what a checkpoint costs: the pause for its copy, and slower steps while it is written.

    python benchmarks/bench_checkpoint.py [--rounds 5] [--ranks 1,2] [--small] [--check]

An actor with 17 million weights (190 MiB with Adam's moments) is updated in worker processes with
one thread each; with two ranks it is sharded. Every round has a blocking checkpoint and a copied
one. Then updates alone alternate with updates during a write, which starts again whenever it ends.
Prints JSON with medians over the rounds; ratios are computed within a round. `--check` fails if a
step during a write takes more than `LIMIT` times as long as one alone; use it on an idle machine.
`--small` is for tests.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch

from trainer.cli import make_tiny
from verl_like import (
    ClassWithInitArgs,
    DataProto,
    Dispatch,
    LocalWorkerGroup,
    ResourcePool,
    register,
)
from workers.config import (
    ActorRolloutRefConfig,
    ModelConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
    WorkersConfig,
)
from workers.roles.actor import ActorWorker

ROWS, PROMPT, RESPONSE = 8, 16, 16
SIZES = {"whole": {"hidden_size": 512, "num_layers": 7}, "small": {"hidden_size": 64}}
TURNS = 4
"""Updates per round, alternately alone and during a write."""
LIMIT = 1.05
"""Maximum ratio of the time of a step during a write to that of a step alone."""
RATIO = "step while writing / alone"


class BackgroundActor(ActorWorker):
    """Writes files of all sizes in the background, and times the training thread."""

    background_from_bytes = 0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, readonly=True)
    def update_actor(self, data: DataProto, ptx: DataProto | None = None) -> dict[str, Any]:
        """Return the metrics, and the CPU seconds of this thread."""
        began = time.thread_time()
        metrics = super().update_actor(data, ptx)
        return {**metrics, "cpu_s": time.thread_time() - began}


def config_of(model: Path) -> WorkersConfig:
    """Return a config with one optimizer step per update."""
    policy = ActorRolloutRefConfig(model=ModelConfig(path=str(model)), rollout=RolloutConfig(n=1))
    policy.actor.ppo_mini_batch_size = ROWS
    policy.actor.ppo_micro_batch_size_per_gpu = ROWS
    policy.actor.use_dynamic_bsz = False
    algorithm = SimpleNamespace(rollout_correction=RolloutCorrectionConfig())
    return WorkersConfig(
        actor_rollout_ref=policy,
        data=SimpleNamespace(max_prompt_length=PROMPT, max_response_length=RESPONSE),
        trainer=SimpleNamespace(seed=0),
        algorithm=algorithm,
    )


def batch() -> DataProto:
    """Return full rows of random tokens."""
    ids = torch.randint(6, 50, (ROWS, PROMPT + RESPONSE))
    inside = torch.ones_like(ids)
    return DataProto.from_dict(
        {
            "prompts": ids[:, :PROMPT].clone(),
            "responses": ids[:, PROMPT:].clone(),
            "input_ids": ids,
            "attention_mask": inside,
            "position_ids": inside.cumsum(-1) - 1,
            "response_mask": inside[:, PROMPT:].clone(),
            "old_log_probs": torch.full((ROWS, RESPONSE), -4.0),
            "advantages": torch.randn(ROWS, RESPONSE),
        }
    )


def seconds(work: Callable[[], Any]) -> float:
    """Return the wall seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def update(group: Any, rows: DataProto) -> tuple[float, float]:
    """Return the wall seconds of an update, and the CPU seconds of its thread (mean over ranks)."""
    began = time.perf_counter()
    cpu = group.update_actor(rows).get()["cpu_s"]
    return time.perf_counter() - began, statistics.mean(cpu)


class Writing:
    """Context in which the copies of all ranks are written repeatedly."""

    def __init__(self, group: Any) -> None:
        self._group, self._is_over = group, threading.Event()
        self.seconds: list[float] = []
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._is_over.is_set():
            self.seconds.append(seconds(lambda: self._group.write_checkpoint.remote().get()))

    def __enter__(self) -> Writing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def turns(group: Any, rows: DataProto) -> dict[str, float]:
    """Alternate updates alone and during a write, so that neither runs in better conditions."""
    alone, beside, writes = [update(group, rows)], [], []
    for _ in range(TURNS):
        with Writing(group) as writing:
            beside.append(update(group, rows))
        alone.append(update(group, rows))
        writes += writing.seconds

    (wall, cpu), (wall_beside, cpu_beside) = (
        [statistics.mean(figures) for figures in zip(*kind, strict=True)]
        for kind in (alone, beside)
    )
    return {
        "step_s": wall,
        RATIO: wall_beside / wall,
        "its CPU seconds, while writing / alone": cpu_beside / cpu,
        "write_s": statistics.mean(writes),
    }


def measure(model: Path, folder: Path, num_ranks: int, rounds: int) -> dict[str, float]:
    """Return medians over the rounds."""
    recipe = ClassWithInitArgs(BackgroundActor, config_of(model))
    group = LocalWorkerGroup(ResourcePool([num_ranks]), recipe, own_processes=True)
    rows, at_once, later = batch(), folder / "at once", folder / "later"
    results: dict[str, list[float]] = {}
    try:
        group.init_model(total_steps=1000)

        update(group, rows)
        group.start_checkpoint(str(later), 0)  # the first copy allocates its memory
        for number in range(rounds):
            for left in (at_once, later):
                shutil.rmtree(left, ignore_errors=True)
            waited = seconds(lambda n=number: group.save_checkpoint(str(at_once), n))
            pause = seconds(lambda n=number: group.start_checkpoint(str(later), n))
            of_round = turns(group, rows) | {
                "pause_s": pause,
                "pause / checkpoint that is waited for": pause / waited,
            }
            for name, value in of_round.items():
                results.setdefault(name, []).append(value)
    finally:
        group.shutdown()
    size = sum(path.stat().st_size for path in later.glob("shards/*"))
    medians = {name: round(statistics.median(values), 4) for name, values in results.items()}
    return {"mib": round(size / 2**20, 1), **medians}


def main() -> None:
    """Parse the command line, and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    missed = []
    size = SIZES["small" if options.small else "whole"]
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny.make(Path(folder) / "made", num_train=1, num_val=1, **size) / "model"
        for count in map(int, options.ranks.split(",")):
            figures = measure(model, Path(folder) / str(count), count, options.rounds)
            print(json.dumps({f"{count} ranks": figures}), flush=True)
            if figures[RATIO] > LIMIT:
                missed.append(f"{count} ranks: {RATIO} {figures[RATIO]}, not <= {LIMIT}")
    sys.exit("\n".join(missed) if options.check and missed else None)


if __name__ == "__main__":
    main()
