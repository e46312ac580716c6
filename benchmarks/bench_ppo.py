"""Measure the speed of GRPO runs, compared with TRL.

    python benchmarks/bench_ppo.py --trl-python PATH [--only grpo,tailed] [--threads 2]

The script prints JSON. PATH is the Python of an environment with TRL 1.16 and the same torch;
without it, only verl-like is measured, with and without `model.compile=on`. Every side has its own
process. The time of a step is measured from outside: the wall time of a run of 25 steps minus that
of 5 steps, divided by 20. Sides run one after the other; results are medians over rounds. Every
round has a different seed, and rewards are means over seeds. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sides import HERE, ask

LIMITS = {
    "grpo.steps_per_s over trl": 1.3,
    "grpo.compiled over trl": 1.5,
    "tailed.steps_per_s over trl": 2.5,
    "grpo.reward_at_20 less trl": 0.0,
    "tailed.reward_at_20 less trl": 0.0,
}
"""Smallest values that are good enough."""


def ask_timed(python: str, *arguments: str, threads: int) -> tuple[Any, float]:
    """Return the output of a side, and its wall time."""
    began = time.perf_counter()
    answer = ask(python, *arguments, threads=threads)
    return answer, time.perf_counter() - began


def compare(
    folder: Path, kind: str, pythons: dict[str, str], rounds: int, threads: int
) -> dict[str, float]:
    """Return the steps per second of every side, and its mean reward around step 20 over seeds."""
    seconds: dict[str, list[float]] = {side: [] for side in pythons}
    reward: dict[str, list[float]] = {side: [] for side in pythons}
    if "compiled" in pythons:  # fills torch's cache of compiled code for later runs
        run = (str(HERE / "grpo_side.py"), "compiled", str(folder), kind)
        ask(pythons["compiled"], *run, "1", threads=threads)
    for seed in range(1, rounds + 1):
        for side, python in pythons.items():
            run = (str(HERE / "grpo_side.py"), side, str(folder), kind)
            _, short = ask_timed(python, *run, "5", str(seed), threads=threads)
            rewards, long = ask_timed(python, *run, "25", str(seed), threads=threads)
            reward[side].append(statistics.mean(rewards[17:22]))
            seconds[side].append((long - short) / 20)

    figures = {f"{side}.step_s": statistics.median(times) for side, times in seconds.items()}
    figures |= {f"{side}.reward_at_20": statistics.mean(of) for side, of in reward.items()}
    if "trl" in pythons:
        figures["steps_per_s over trl"] = figures["trl.step_s"] / figures["ours.step_s"]
        figures["compiled over trl"] = figures["trl.step_s"] / figures["compiled.step_s"]
        less = figures["ours.reward_at_20"] - figures["trl.reward_at_20"]
        figures["reward_at_20 less trl"] = less
        if rounds > 1:
            errors = (statistics.variance(of) / rounds for of in reward.values())
            figures["reward_at_20 less trl, standard error"] = math.sqrt(sum(errors))
    return figures


def main() -> None:
    """Run the selected measurements, then print which limits hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trl-python", help="Python of an environment with TRL 1.16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="grpo,tailed")
    parser.add_argument("--threads", type=int, default=1, help="of every side")
    options = parser.parse_args()

    pythons = {"ours": sys.executable, "compiled": sys.executable} | (
        {"trl": options.trl_python} if options.trl_python else {}
    )
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ask(sys.executable, str(HERE / "grpo_side.py"), "make", name)
        for section in options.only.split(","):
            kind = "fixed" if section == "grpo" else "tailed"
            results = compare(folder, kind, pythons, options.rounds, options.threads)
            figures |= {f"{section}.{key}": value for key, value in results.items()}

    limits = {
        key: {"value": round(figures[key], 4), "limit": limit, "holds": figures[key] >= limit}
        for key, limit in LIMITS.items()
        if key in figures
    }
    print(json.dumps({"figures": figures, "limits": limits}, indent=2))


if __name__ == "__main__":
    main()
