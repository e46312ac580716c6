"""Compare a long run whose workers are killed repeatedly with an undisturbed run.

    python benchmarks/bench_soak.py [--steps 1000] [--kill-every 100] [--folder FOLDER] [--wide]

Both runs train the tiny model on two worker processes of the local backend, one run after the
other, each in its own process. Kills come from `faults.kill_worker`, with a seed that has one kill
per `--kill-every` steps on average. The script prints whether all lines of `metrics.jsonl` are
equal except for times, the memory of driver and workers, the kB per step in the run folder, and the
restarts. A run in FOLDER that was interrupted continues from its last checkpoint. With `--wide`,
there are two pools of two processes, and also a critic, a reference and a reward model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from bench_detection import POOLS, make_judge
from sides import ENV, HERE

SAVE_FREQ = 20
LOOKED_AT = (0.2, 0.6, 1.0)
"""Fractions of the run after which memory and run folder are measured."""
SHOWN = ("step", "critic/score/mean", "actor/pg_loss", "actor/grad_norm")
"""Metrics that are printed from the last lines of metrics.jsonl."""
WIDE = (
    *POOLS,
    *("trainer.n_gpus_per_node=4", "algorithm.adv_estimator=gae", "reward.model.enable=true"),
    *("actor_rollout_ref.actor.use_kl_loss=true", "data.train_batch_size=4"),
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
)
"""Settings of `--wide`, in addition to the common ones."""
CHANGES = ("timing", "perf/")
"""Prefixes of metrics that depend on the clock."""


class Gauge:
    """A callback that records the memory of a run's processes and the size of its folder."""

    def __init__(self, steps: int) -> None:
        self._at = {round(share * steps) for share in LOOKED_AT}
        self.readings: dict[int, dict[str, float]] = {}

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Record the values; those of a step that is repeated are overwritten."""
        import psutil

        if trainer.global_step not in self._at:
            return
        driver = psutil.Process()
        calls = trainer.groups["actor"].transport
        workers = [psutil.Process(calls.pid_here(rank)) for rank in range(calls.world_size)]
        checkpoints = set(trainer.folder.glob("global_step_*/**/*"))
        files = [f for f in trainer.folder.rglob("*") if f.is_file() and f not in checkpoints]
        self.readings[trainer.global_step] = {
            "driver MiB": driver.memory_info().rss / 2**20,
            **{f"worker {n} MiB": w.memory_info().rss / 2**20 for n, w in enumerate(workers)},
            "folder kB a step": sum(file.stat().st_size for file in files)
            / 1e3
            / trainer.global_step,
        }


@contextmanager
def timed_restarts() -> Iterator[list[float]]:
    """Context that yields a list with the seconds from each failure to the next completed step."""
    from trainer.loop import Loop
    from trainer.restarts import Restarts

    seconds: list[float] = []
    failed: list[float] = []
    wait, begin = Restarts.wait_for_next, Loop._step

    def wait_for_next(self: Restarts, *arguments: Any) -> None:
        failed.append(time.monotonic())
        wait(self, *arguments)

    def timed_step(self: Loop) -> dict[str, float]:
        metrics = begin(self)
        if failed:
            seconds.append(time.monotonic() - failed.pop())
        return metrics

    Restarts.wait_for_next, Loop._step = wait_for_next, timed_step  # type: ignore
    try:
        yield seconds
    finally:
        Restarts.wait_for_next, Loop._step = wait, begin  # type: ignore


def seed_of(kills: int, steps: int, chance: float) -> int:
    """Return the first seed with which `trainer.observers.fault_injection` kills this often."""

    def drawn(seed: int) -> int:
        draws = (Random(f"{seed}/kill_worker/{step}") for step in range(1, steps + 1))
        return sum(draw.random() < chance for draw in draws)

    return next(seed for seed in count(1) if drawn(seed) == kills)


def side(folder: Path, tiny: Path, steps: int, kill_every: int, wide: bool) -> dict[str, Any]:
    """Make one run; it is undisturbed if `kill_every` is 0."""
    from trainer import load_config, run

    overrides = [
        f"actor_rollout_ref.model.path={tiny}/model",
        f"data.train_files={tiny}/train.parquet",
        f"trainer.default_local_dir={folder}",
        *("trainer.backend=local", "trainer.device=cpu", "trainer.n_gpus_per_node=2"),
        *(f"trainer.total_training_steps={steps}", f"trainer.save_freq={SAVE_FREQ}"),
        *("data.train_batch_size=2", "data.max_prompt_length=16", "data.max_response_length=8"),
        *("actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=4"),
        *("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false"),
        *("actor_rollout_ref.actor.optim.lr=1e-3", "trainer.logger=[]"),
    ]
    if wide:
        overrides += [*WIDE, f"reward.model.path={tiny}/judge"]
    if kill_every:
        kills, chance = steps // kill_every, 1 / kill_every
        seed = seed_of(kills, steps, chance)
        overrides += [f"faults.kill_worker={chance}", f"faults.seed={seed}"]
        overrides += [f"trainer.max_restarts={kills}"]

    gauge, began = Gauge(steps), time.monotonic()
    with timed_restarts() as restarts:
        run(load_config(overrides), callbacks=[gauge])
    seconds = time.monotonic() - began
    return {"seconds": seconds, "restarts": restarts, "readings": gauge.readings}


def lines(folder: Path) -> list[dict[str, float]]:
    """Return the lines of `metrics.jsonl`, without metrics that depend on the clock."""
    results = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(CHANGES)} for line in results]


def report(folders: dict[str, Path], sides: dict[str, dict[str, Any]], steps: int) -> None:
    """Print the results of both runs."""
    for name, facts in sides.items():
        print(f"{name}: {facts['seconds']:.0f} s")
        for step, reading in facts["readings"].items():
            print(f"  step {step}:", ", ".join(f"{k} {v:.1f}" for k, v in reading.items()))
        if facts["restarts"]:
            times = " ".join(f"{seconds:.1f}" for seconds in facts["restarts"])
            print(
                f"  {len(facts['restarts'])} restarts, from the failure to the next step: {times} s"
            )
    faults = (folders["killed"] / "faults.jsonl").read_text().splitlines()
    print("faults and ledger:", *faults, sep="\n  ")

    whole, killed = (lines(folders[name]) for name in ("undisturbed", "killed"))
    for name, last in (("undisturbed", whole[-1]), ("killed", killed[-1])):
        print(f"last line, {name}:", {metric: last[metric] for metric in SHOWN})
    apart = [line["step"] for line, other in zip(whole, killed, strict=False) if line != other]
    same = not apart and len(whole) == len(killed) == steps
    print(f"{len(whole)} and {len(killed)} lines of metrics.jsonl, equal: {same}", apart[:3] or "")


def main() -> None:
    """Parse the command line, and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--kill-every", type=int, default=100)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--side", choices=["undisturbed", "killed"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        every = options.kill_every if options.side == "killed" else 0
        tiny = options.folder / "tiny"
        facts = side(options.folder / options.side, tiny, options.steps, every, options.wide)
        print(json.dumps(facts))
        return

    from trainer.cli.make_tiny import make as make_tiny

    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        make_judge(make_tiny(folder / "tiny"))
        sides = {}
        for name in ("undisturbed", "killed"):
            command = [sys.executable, __file__, "--side", name, "--folder", str(folder)]
            command += ["--steps", str(options.steps), "--kill-every", str(options.kill_every)]
            command += ["--wide"] * options.wide
            env = ENV | {"PYTHONPATH": str(HERE.parent)}
            done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
            sides[name] = json.loads(done.stdout.splitlines()[-1])
        report({name: folder / name for name in sides}, sides, options.steps)


if __name__ == "__main__":
    main()
