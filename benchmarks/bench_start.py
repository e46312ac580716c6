"""Measure a run's time before its first step, compared with Python, torch and Ray alone.

    python benchmarks/bench_start.py [--rounds 3] [--only import,help,local,ray,quickstart]

The script prints JSON. Every value comes from a new process, alternating with the bare process that
it is compared with (for Ray, one with two actors that import torch and transformers). Values are
wall seconds, and the CPU seconds of the process with all its children, which other work on the
machine affects less. `quickstart` clones this checkout into an empty folder and runs the script
there, including the installation, with pip's existing cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
ENV = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONPATH": str(CHECKOUT),
}
LIMITS = {
    "import.seconds": 0.3,
    "help.seconds": 0.3,
    "local.seconds": 6.0,
    "ray.seconds": 12.0,
    "quickstart.seconds": 90.0,
}
"""Limits in wall seconds, on two idle cores."""
PYTHON = "pass"
LIBRARIES = "import torch, transformers"
IMPORT = "import verl_like, workers, trainer"
HELP = "import sys; sys.argv[1:] = ['ppo', '--help']; from trainer.cli.main import main; main()"
READY = "READY "


def bare(code: str) -> Callable[[], dict[str, float]]:
    """Return a measurement of a Python process that only runs this code."""

    def measure() -> dict[str, float]:
        before, began = os.times(), time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, env=ENV, stdout=subprocess.DEVNULL)
        seconds, after = time.perf_counter() - began, os.times()
        cpu = after.children_user + after.children_system
        return {
            "seconds": seconds,
            "cpu": cpu - before.children_user - before.children_system,
        }

    return measure


def until_ready(side_name: str, tiny: Path) -> Callable[[], dict[str, float]]:
    """Return a measurement of a side of this file, from its process's start to its line READY."""

    def measure() -> dict[str, float]:
        side = [sys.executable, __file__, "--side", side_name, str(tiny)]
        began = time.time()
        done = subprocess.run(side, env=ENV, capture_output=True, text=True, check=False)
        results = [line for line in done.stdout.splitlines() if line.startswith(READY)]
        if not results:
            sys.exit(f"{' '.join(side)} failed:\n{done.stderr[-3000:]}")
        at, cpu = json.loads(results[0].removeprefix(READY))
        return {"seconds": at - began, "cpu": cpu}

    return measure


def say_ready() -> None:
    """Print the time, and the CPU seconds of this process and its descendants."""
    import psutil

    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    cpu = sum(t.user + t.system + t.children_user + t.children_system for t in times)
    print(READY + json.dumps([time.time(), cpu]), flush=True)


def bare_ray() -> None:
    """Start Ray with two actors that import what every worker needs."""
    import ray

    @ray.remote(num_cpus=1)
    class Bare:
        def ready(self) -> None:
            import torch  # noqa: F401
            import transformers  # noqa: F401

    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    actors = [Bare.remote() for _ in range(2)]
    ray.get([actor.ready.remote() for actor in actors])
    say_ready()


def run_to_first_step(backend: str, tiny: Path) -> None:
    """Run one step, and report when it begins."""
    from trainer import load_config, run

    class FirstStep:
        def on_step_begin(self, trainer: Any) -> None:
            say_ready()

    with tempfile.TemporaryDirectory() as folder:
        settings = [
            f"trainer.backend={backend}",
            f"trainer.default_local_dir={folder}",
            f"actor_rollout_ref.model.path={tiny}/model",
            f"data.train_files={tiny}/train.parquet",
            "data.train_batch_size=16",
            "data.max_prompt_length=16",
            "data.max_response_length=8",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            "trainer.total_training_steps=1",
            "trainer.save_freq=-1",
            "trainer.logger=[]",
        ]
        if backend == "ray":
            settings += ["placement=split", "trainer.n_gpus_per_node=2"]
        run(load_config(settings), callbacks=[FirstStep()])


def quickstart() -> dict[str, float]:
    """Run the script as on a machine without the project: clone, environment, installation, run."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "-q", str(CHECKOUT), str(clone)], check=True)
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        before, began = os.times(), time.perf_counter()
        script = ["bash", "examples/quickstart/run.sh"]
        subprocess.run(script, cwd=clone, env=env, check=True, stdout=subprocess.DEVNULL)
        seconds, after = time.perf_counter() - began, os.times()
    cpu = after.children_user + after.children_system
    return {"seconds": seconds, "cpu": cpu - before.children_user - before.children_system}


def in_turn(
    sides: dict[str, Callable[[], dict[str, float]]], rounds: int
) -> dict[str, dict[str, float]]:
    """Return the medians of every side over rounds; sides alternate in each round."""
    taken: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, measure in sides.items():
            taken[side].append(measure())
    return {
        side: {name: statistics.median(measurement[name] for measurement in of) for name in of[0]}
        for side, of in taken.items()
    }


def figures_of(only: Sequence[str], tiny: Path, rounds: int) -> dict[str, float]:
    """Return the selected values as `<side>.<what>`, with ratios to the bare processes."""
    sides = {
        "python": bare(PYTHON),
        "libraries": bare(LIBRARIES),
        "bare_ray": until_ready("bare_ray", tiny),
        "import": bare(IMPORT),
        "help": bare(HELP),
        "local": until_ready("local", tiny),
        "ray": until_ready("ray", tiny),
    }
    against = {"import": "python", "help": "python", "local": "libraries", "ray": "bare_ray"}
    sides = [side for side in against if side in only]
    wanted = {*sides, *(against[side] for side in sides)}
    results = in_turn({side: sides[side] for side in sides if side in wanted}, rounds)
    if "quickstart" in only:
        results["quickstart"] = quickstart()

    figures = {
        f"{side}.{name}": value for side, of in results.items() for name, value in of.items()
    }
    for side in sides:
        ratio = results[side]["cpu"] / results[against[side]]["cpu"]
        figures[f"{side}.cpu over {against[side]}"] = ratio
    return figures


def main() -> None:
    """Run the selected measurements, then print which limits hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="import,help,local,ray")
    parser.add_argument("--side", nargs=2, metavar=("SIDE", "TINY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        name, tiny = options.side
        return bare_ray() if name == "bare_ray" else run_to_first_step(name, Path(tiny))

    with tempfile.TemporaryDirectory() as folder:
        from trainer.cli.make_tiny import make

        tiny = make(Path(folder) / "tiny")
        figures = figures_of(options.only.split(","), tiny, options.rounds)
    limits = {}
    for name, limit in LIMITS.items():
        if name in figures:
            limits[name] = {"limit": limit, "holds": figures[name] <= limit}
    rounded = {name: round(value, 3) for name, value in figures.items()}
    print(json.dumps({"figures": rounded, "limits": limits}, indent=2))


if __name__ == "__main__":
    main()
