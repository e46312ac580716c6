"""Check that the memory of an asynchronous run stays flat over its steps.

    python benchmarks/bench_async_memory.py [--steps 200] [--folder FOLDER]

It runs a tiny model with one generator and one trainer on the local backend, and prints JSON after
each quarter of the steps: the resident MiB of the driver, which also trains, and of the generator's
process, and the sizes of the driver's records (open groups in the ledger, the buffer, calls in the
timeline).
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from trainer import load_config, run
from trainer.async_training.recipe import ASYNC
from trainer.cli import make_tiny
from verl_like.process.machine import resident_bytes

SETTINGS = (
    "data.train_batch_size=8",
    "data.max_prompt_length=16",
    "data.max_response_length=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=2",
    "trainer.backend=local",
    "trainer.logger=[]",
)


class Sizes:
    """A callback that records sizes four times in a run."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.rows: list[dict[str, Any]] = []

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Add a row after each quarter of the steps."""
        step = trainer.global_step
        if step % max(self.steps // 4, 1):
            return
        buffer, generator = trainer.buffer, trainer.groups["rollout"].transport.pid_here(0)
        self.rows.append(
            {
                "step": step,
                "driver_mib": round((resident_bytes(os.getpid()) or 0) / 2**20, 1),
                "generator_mib": round((resident_bytes(generator) or 0) / 2**20, 1),
                "open_samples": len(buffer.log._open),
                "queued": buffer.depth,
                "chunks_in_flight": len(buffer.in_flight()),
                "calls": len(trainer.run.calls),
            }
        )


def measure(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Return a row for every quarter of the run."""
    tiny = make_tiny.make(folder / "tiny")
    paths = (
        f"actor_rollout_ref.model.path={tiny}/model",
        f"data.train_files={tiny}/train.parquet",
        f"trainer.default_local_dir={folder}/run",
        f"trainer.total_training_steps={steps}",
    )
    sizes = Sizes(steps)
    run(load_config([*SETTINGS, *paths], ASYNC), callbacks=[sizes])
    return sizes.rows


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="default: 200")
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        print(json.dumps(measure(folder, arguments.steps), indent=1))


if __name__ == "__main__":
    main()
