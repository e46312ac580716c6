"""What `verl-like plan` chooses on this machine, beside every placement there is, measured.

    verl-like plan --calibrate
    python benchmarks/bench_placement.py [--only "long critic,..."] [--rounds 2] [--steps 8]

Ten tiny jobs on two processes, whose best placements differ: for each, every way to share the two
out is run as the planner writes it down, one after the other, in rounds there and back. The
shortest step behind a run's first counts: neighbours of a shared machine make steps longer, never
shorter, for minutes at a time. Prints JSON: seconds of each placement, predicted and measured, and
how many times the best measured step the planner's choice takes (asked: 1.05).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from sides import ENV

from trainer.cli.calibrate import run_measured
from trainer.cli.make_tiny import make
from trainer.cli.plan import job_of
from trainer.planner.measured import MeasuredRun
from trainer.planner.search import Placement
from trainer.report.read import read_run

CARDS = 2
SIZES = {"small": (64, 2), "large": (192, 6)}
"""Hidden size and layers of the models."""
SMALL, LARGE = "{folder}/small/model", "{folder}/large/model"
CRITIC = ["algorithm.adv_estimator=gae"]
GROUPS = ["algorithm.adv_estimator=grpo"]
REFERENCE = ["actor_rollout_ref.actor.use_kl_loss=true"]
JOBS: dict[str, list[str]] = {
    "long critic": [*CRITIC, f"critic.model.path={LARGE}"],
    "critic as large": CRITIC,
    "critic with many updates": [*CRITIC, "critic.ppo_epochs=4"],
    "critic and reference": [*CRITIC, *REFERENCE],
    "long generation": [*GROUPS, "data.max_response_length=128", "data.train_batch_size=16"],
    "long generation and reference": [*GROUPS, *REFERENCE, "data.max_response_length=128"],
    "big reference": [*GROUPS, *REFERENCE, f"actor_rollout_ref.ref.model.path={LARGE}"],
    "slow reward": [*GROUPS, *REFERENCE, "custom_reward_function.path={folder}/slow.py"],
    "tailed lengths": [*CRITIC, "data.max_response_length=256", "data.train_batch_size=16"],
    "many small updates": [*GROUPS, "actor_rollout_ref.actor.ppo_mini_batch_size=4"],
}
SLOW_REWARD = """
import time


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.005)
    return float(len(solution_str) % 2)
"""


def settings_of(name: str, folder: Path) -> list[str]:
    """The keys of a job; later ones stand."""
    given = [
        f"actor_rollout_ref.model.path={SMALL}",
        "data.train_files={folder}/small/train.parquet",
        "data.train_batch_size=32",
        "data.max_prompt_length=16",
        "data.max_response_length=32",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        *JOBS[name],
    ]
    last = dict(each.format(folder=folder).split("=", 1) for each in given)
    return [f"{key}={value}" for key, value in last.items()]


def placements_of(settings: list[str], means: list[str]) -> tuple[Any, list[Placement]]:
    """The job, and all its placements on the cards, the fastest by prediction first."""
    job = job_of([*settings, *means, f"plan.gpus={CARDS}", "plan.device=cpu"])
    found = job.search.best([1, CARDS], CARDS, 1000)
    return job, [each for each in found if job.why_refused(each) is None]


def measured(settings: list[str], keys: list[str], steps: int) -> tuple[MeasuredRun, list[float]]:
    """A run of the job, placed by these keys, and the seconds of its steps behind the first."""
    here = ["trainer.device=cpu", f"trainer.n_gpus_per_node={CARDS}"]
    with tempfile.TemporaryDirectory() as folder:
        run = run_measured([*settings, *keys, *here], steps, Path(folder))
        lines = read_run(folder).metrics
    return run, [line["timing_s/step"] for line in lines if line["step"] > 1]


def compared(name: str, folder: Path, rounds: int, steps: int) -> dict[str, Any]:
    """One job: all its placements."""
    settings = settings_of(name, folder)
    first, _ = measured(settings, ["placement=colocate"], 3)  # how long its answers are
    means = [
        f"plan.mean_prompt={first.prompt}",
        f"plan.mean_response={first.response}",
        f"plan.rewards={max(first.rewards, 1e-6)}",
    ]
    job, found = placements_of(settings, means)
    seconds: list[list[float]] = [[] for _ in found]
    for number in range(rounds):
        for placement, taken in list(zip(found, seconds, strict=True))[:: (-1) ** number]:
            taken += measured(settings, job.overrides(placement), steps)[1]
    rows = []
    for placement, taken in zip(found, seconds, strict=True):
        row = {"predicted": placement.step, "measured": min(taken)}
        rows.append({"placement": placement.in_words, **row, "median": statistics.median(taken)})
        print(name, rows[-1], file=sys.stderr, flush=True)
    best = min(row["measured"] for row in rows)
    return {"choice / best": rows[0]["measured"] / best, "placements": rows}


def main() -> None:
    """All jobs, or those that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(JOBS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(ENV)  # of the runs
    result = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "slow.py").write_text(SLOW_REWARD)
        for size, (hidden, layers) in SIZES.items():
            make(folder / size, hidden_size=hidden, num_layers=layers)
        for job in options.only.split(","):
            result[job] = compared(job, folder, options.rounds, options.steps)
    ratios = [found["choice / best"] for found in result.values()]
    summary = {"worst": max(ratios), "median": statistics.median(ratios)}
    print(json.dumps({"jobs": result, "choice / best": summary}, indent=1))


if __name__ == "__main__":
    main()
