"""The cost of staleness in learning; `bench_async.py --learning` runs one process per seed.

    python benchmarks/async_learning.py FOLDER SEED STEPS

The script prints JSON: case -> mean score of the policy after STEPS steps, on prompts that it was
not trained on. FOLDER was written by `verl-like make-tiny`. All runs have the same number of
samples. Before each step, the trainer waits until the generators must pause, so that samples are as
old as `max_staleness` allows on every machine.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from trainer import load_config, run
from trainer.async_training.recipe import ASYNC
from trainer.async_training.step import AsyncTrainer
from trainer.record import Metrics

NUM_PROMPTS, NUM_SAMPLES = 16, 8
LONGEST_WAIT_S = 20.0
WITHOUT = "without correction"
CASES = {
    f"lr {lr:g}: {name}": (f"actor_rollout_ref.actor.optim.lr={lr:g}", *settings)
    for lr in (1e-3, 3e-3)
    for name, settings in {
        "staleness 0": ("async_training.max_staleness=0",),
        "staleness 1": ("async_training.max_staleness=1",),
        "staleness 4": ("async_training.max_staleness=4",),
        "staleness 8": ("async_training.max_staleness=8",),
        f"staleness 4 {WITHOUT}": ("async_training.max_staleness=4", "correction=disabled"),
        f"staleness 8 {WITHOUT}": ("async_training.max_staleness=8", "correction=disabled"),
    }.items()
}


class AsOldAsMayBe(AsyncTrainer):
    """Takes a batch only when the queue is as full as `max_staleness` allows."""

    def on_step_begin(self) -> None:
        """Wait until the generators pause; the first step starts them."""
        if self.global_step == 1:
            return
        ahead = min(
            self.config.async_training.max_staleness, self.total_steps - self.global_step + 1
        )
        wanted, end = ahead * NUM_PROMPTS * NUM_SAMPLES, time.monotonic() + LONGEST_WAIT_S
        while self.buffer.depth < wanted and time.monotonic() < end:
            time.sleep(0.005)


class Scores:
    """Records the validation score, and the ages of the samples in each step."""

    def __init__(self, run_folder: str) -> None:
        """Start without any records."""
        self._metrics = Path(run_folder) / "metrics.jsonl"
        self.validation = 0.0
        self.ages: list[float] = []

    def on_step_end(self, trainer: AsyncTrainer, metrics: Metrics) -> None:
        """Called by the trainer."""
        self.ages.append(metrics["async/staleness/mean"])
        results = [value for name, value in metrics.items() if name.startswith("val-core/")]
        if results:
            self.validation = results[0]

    def on_train_end(self, trainer: AsyncTrainer) -> None:
        """Delete the metrics, because drawing a report would take longer than the steps."""
        self._metrics.unlink()


def learn(folder: Path, case: str, seed: int, steps: int) -> dict[str, float]:
    """Return the score after the last step, and the mean age of samples in the second half."""
    with tempfile.TemporaryDirectory() as run_folder:
        overrides = [
            "trainer.backend=local",
            "trainer.device=cpu",
            "trainer.logger=[]",
            f"trainer.default_local_dir={run_folder}",
            f"trainer.total_training_steps={steps}",
            f"trainer.test_freq={steps}",
            f"trainer.seed={seed}",
            f"actor_rollout_ref.model.path={folder}/model",
            f"data.train_files={folder}/train.parquet",
            f"data.val_files={folder}/val.parquet",
            f"data.train_batch_size={NUM_PROMPTS}",
            "data.max_prompt_length=16",
            "data.max_response_length=8",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={NUM_PROMPTS // 2}",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64",
            f"actor_rollout_ref.rollout.n={NUM_SAMPLES}",
            "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
            "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
            "actor_rollout_ref.rollout.val_kwargs.n=8",
            "algorithm.adv_estimator=grpo",
            *CASES[case],
        ]

        scores = Scores(run_folder)
        run(load_config(overrides, ASYNC), AsOldAsMayBe, callbacks=[scores])
    late = scores.ages[steps // 2 :]
    return {"score": scores.validation, "age": sum(late) / len(late)}


def main() -> None:
    """Parse the command line, and run the benchmark."""
    folder, seed, steps = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    print(json.dumps({case: learn(folder, case, seed, steps) for case in CASES}), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
