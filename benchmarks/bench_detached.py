"""Detached PPO beside the synchronous run, and beside its makers and its trainer alone.

    python benchmarks/bench_detached.py [--only speed,ray,driver,slow,memory] [--json FILE]
        [--rounds 2] [--steps 20] [--prompts 16] [--layers 2]
    python benchmarks/bench_detached.py --learning      rewards at equal samples, over seeds

prints a table and which limits hold. Every side is a process of its own, one thread each
(`detached_side.py`); sides run in turn, and the median over rounds counts; each round is printed
as it ends. A rate is samples a second of the steps after `WARM_UP`. The last steps of a detached
run, for which nothing is made any more, do not count. `speed` is `backend=local`, whose makers are
child processes; `ray` is Ray, and `driver` what the driver's process takes of a core there, by
threads, beside what Ray alone takes for the same calls with nothing done.
Run it on an idle machine with two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from detached_learning import WITHOUT
from detached_side import LAST, NUM_PROMPTS, NUM_SAMPLES, WARM_UP
from sides import ENV, HERE

SIDE = str(HERE / "detached_side.py")
BARE_DRIVER = str(HERE / "bare_driver_side.py")
STEPS = 20
"""Steps of a run."""
ALONE = ("makers_alone", "trainer_alone")
SIDES = {
    "local": ("synchronous", "staleness_0", "staleness_1", "staleness_4", *ALONE),
    "ray": ("synchronous", "split", "staleness_1", "critic_apart", *ALONE),
}
"""`placement=split` has the rollout beside the actor and the critic apart, which only Ray
overlaps; `critic_apart` is staleness 1 with that placement of both."""
LIMITS: dict[str, tuple[str, float]] = {
    "staleness 1 over the synchronous run": (">=", 1.3),
    "staleness 1 over placement=split": (">=", 1.3),
    "staleness 1 over placement=split, critic apart in both": (">=", 1.3),
    "staleness 1 over the slower side alone": (">=", 0.85),
    "driver, share of a core": ("<=", 0.05),
    "slow send and update over serial": ("<=", 0.75),
    "memory growth over 150 steps, MiB": ("<=", 20.0),
}
Facts = dict[str, list[float]]


def start(*arguments: str, script: str = SIDE) -> subprocess.Popen[str]:
    """A side, in a process of its own."""
    env = ENV | {"PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, script, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


def answer(process: subprocess.Popen[str]) -> Any:
    """What a side prints, once it has ended."""
    try:
        printed, _ = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.kill()
        sys.exit(f"{process.args} has not ended in 600 s: is the machine busy?")
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        sys.exit(f"{process.args} failed: its error stands above.")
    return json.loads(lines[-1])


def rate(facts: Facts, prompts: int) -> float:
    """Samples a second of the steps that count."""
    ended = facts["ended"][WARM_UP - 1 : len(facts["ended"]) - LAST]
    return prompts * NUM_SAMPLES * (len(ended) - 1) / (ended[-1] - ended[0])


def driver_share(facts: Facts) -> float:
    """Of a core, by the driver's process."""
    counted = slice(WARM_UP - 1, len(facts["ended"]) - LAST)
    ended, used = facts["ended"][counted], facts["cpu_s"][counted]
    return (used[-1] - used[0]) / (ended[-1] - ended[0])


def rates_at_once(folder: str, backend: str, prompts: int) -> dict[str, float]:
    """Makers and trainer alone, but at once: what they cost each other without a word between.

    Of the time in which both were at work; a side that ends first is started with more steps.
    """
    steps = {"makers_alone": 3 * STEPS, "trainer_alone": STEPS}
    processes = {
        name: start(name, folder, backend, str(n), str(prompts)) for name, n in steps.items()
    }
    found = {name: answer(process) for name, process in processes.items()}
    begin = max(facts["ended"][WARM_UP - 1] for facts in found.values())
    end = min(facts["ended"][-1] for facts in found.values())
    rates = {}
    for name, facts in found.items():
        within = [time for time in facts["ended"] if begin <= time <= end]
        if len(within) < WARM_UP:
            return {}
        rate_within = (len(within) - 1) / (within[-1] - within[0])
        rates[f"{name} at once"] = prompts * NUM_SAMPLES * rate_within
    return rates


def speed(folder: str, backend: str, rounds: int, steps: int, prompts: int) -> dict[str, float]:
    """Samples a second of every side, and what staleness 1 makes of them."""
    rates: dict[str, list[float]] = {}
    shares: list[float] = []
    lengths: list[float] = []
    for _ in range(rounds):
        for name in SIDES[backend]:
            facts = answer(start(name, folder, backend, str(steps), str(prompts)))
            rates.setdefault(name, []).append(rate(facts, prompts))
            share = driver_share(facts)
            seen = f"{rates[name][-1]:.1f} samples/s, the driver's process {share:.1%} of a core"
            print(f"{backend} {name}: {seen}", file=sys.stderr)
            lengths += [length for length in facts["length"] if length]
            if name == "staleness_1":
                shares.append(share)
        if backend == "local":
            for name, found in rates_at_once(folder, backend, prompts).items():
                rates.setdefault(name, []).append(found)

    found = {f"{name}, samples/s": statistics.median(of) for name, of in rates.items()}
    middle = {name: statistics.median(of) for name, of in rates.items()}
    ahead = middle["staleness_1"]
    found["mean length, tokens"] = statistics.mean(lengths)
    found["staleness 1 over the synchronous run"] = ahead / middle["synchronous"]
    if "split" in middle:
        found["staleness 1 over placement=split"] = ahead / middle["split"]
        apart = middle["critic_apart"] / middle["split"]
        found["staleness 1 over placement=split, critic apart in both"] = apart
    found["staleness 1 over the slower side alone"] = ahead / min(middle[name] for name in ALONE)
    if "trainer_alone at once" in middle:
        at_once = min(middle[f"{name} at once"] for name in ALONE)
        found["staleness 1 over the slower side, both at once"] = ahead / at_once
    if backend == "ray":  # in process the driver is the trainer as well
        found["driver, share of a core"] = statistics.median(shares)
    return found


def driver(folder: str, rounds: int, steps: int) -> dict[str, float]:
    """Milliseconds of a core that the driver's process takes a step, by kind of thread, on Ray.

    On a machine that is not idle they are more, but far less so than times by the clock.
    """
    found: dict[str, list[float]] = {}
    for prompts in (NUM_PROMPTS, 4 * NUM_PROMPTS):
        samples = prompts * NUM_SAMPLES
        for _ in range(rounds):
            facts = answer(start("staleness_1", folder, "ray", str(steps), str(prompts)))
            taken = [key for key in facts if key.startswith("cpu_s of ")]
            ms = {key: 1e3 * (facts[key][1] - facts[key][0]) for key in taken}
            for key, value in {"all": sum(ms.values()), **ms}.items():
                row = f"{samples} samples: {key.removeprefix('cpu_s of ')}, ms a step"
                found.setdefault(row, []).append(value / (steps - LAST - WARM_UP))
    for _ in range(rounds):
        bare = answer(start(script=BARE_DRIVER))
        found.setdefault("64 samples: Ray alone, idle, ms a step", []).append(bare["ms"])
        found.setdefault("64 samples: Ray alone, idle, share of a core", []).append(bare["share"])
    return {row: statistics.median(values) for row, values in found.items()}


def slow(folder: str, rounds: int) -> dict[str, float]:
    """Twenty steps with a slow send and a slow update: overlapped over one after the other."""
    seconds: dict[str, list[float]] = {"slow_serial": [], "slow_overlapped": []}
    for _ in range(rounds):
        for name, times in seconds.items():
            ended = answer(start(name, folder, "local", "21"))["ended"]
            times.append(ended[-1] - ended[0])
    serial, overlapped = (statistics.median(times) for times in seconds.values())
    return {
        "20 steps one after the other, s": serial,
        "20 steps overlapped, s": overlapped,
        "slow send and update over serial": overlapped / serial,
    }


def memory(folder: str) -> dict[str, float]:
    """Resident memory of the driver, which trains as well, over 200 steps."""
    resident = answer(start("memory", folder, "local", "200"))["rss_mib"]
    late = statistics.linear_regression(range(100), resident[100:])
    return {
        "memory after 50 steps, MiB": resident[49],
        "memory after 200 steps, MiB": resident[199],
        "memory growth over 150 steps, MiB": resident[199] - resident[49],
        "memory growth a step in the last 100, KiB": late.slope * 1024,
    }


def learning(folder: str, seeds: int, steps: int) -> dict[str, float]:
    """Scores at equal samples: a case's mean, its spread, and Welch's t against staleness 0."""
    scores: dict[str, list[float]] = {}
    ages: dict[str, list[float]] = {}
    waiting = list(range(1, seeds + 1))
    while waiting:
        now, waiting = waiting[:2], waiting[2:]
        script = str(HERE / "detached_learning.py")
        running = [start(folder, str(seed), str(steps), script=script) for seed in now]
        for cases in map(answer, running):
            for case, found in cases.items():
                scores.setdefault(case, []).append(found["score"])
                ages.setdefault(case, []).append(found["age"])

    found = {}
    for case, of in scores.items():
        found[f"{case}: mean score"] = statistics.mean(of)
        found[f"{case}: standard deviation"] = statistics.stdev(of)
        found[f"{case}: mean age of samples, versions"] = statistics.mean(ages[case])
    for case, of in scores.items():
        synchronous = f"{case.partition(':')[0]}: staleness 0"
        corrected = case.removesuffix(f" {WITHOUT}")
        if case != synchronous:
            found[f"{case} less staleness 0: t"] = welch(of, scores[synchronous])
        if case != corrected and corrected in scores:
            found[f"{case} less with correction: t"] = welch(of, scores[corrected])
    return found


def welch(these: list[float], those: list[float]) -> float:
    """The difference of the means over its standard error."""
    squares = sum(statistics.variance(of) / len(of) for of in (these, those))
    return (statistics.mean(these) - statistics.mean(those)) / squares**0.5


def judge(figures: dict[str, float]) -> dict[str, dict[str, Any]]:
    """The limits on what was measured, and whether they hold."""
    found = {}
    for key, value in figures.items():
        relation, limit = LIMITS.get(key.split(": ", 1)[-1], ("", 0.0))
        if relation:
            holds = value >= limit if relation == ">=" else value <= limit
            found[key] = {"value": round(value, 4), "limit": f"{relation} {limit}", "holds": holds}
    return found


def show(figures: dict[str, float], limits: dict[str, dict[str, Any]]) -> None:
    """A line for each figure; with its limit, if there is one."""
    for key, value in figures.items():
        limit = limits.get(key)
        verdict = ""
        if limit:
            verdict = f"   {limit['limit']}: {'holds' if limit['holds'] else 'DOES NOT HOLD'}"
        print(f"{key:72} {value:10.3f}{verdict}", flush=True)


def main() -> None:
    """Measure what was asked for, then say which limits hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="speed,ray,driver,slow,memory")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help="of a step")
    parser.add_argument("--layers", type=int, default=2, help="of the policy and of the critic")
    parser.add_argument("--learning", action="store_true", help="only rewards, over seeds")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--learning-steps", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()

    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        answer_of_make = start("make", folder, str(options.layers))
        if answer_of_make.wait():
            sys.exit("the tiny model could not be written: the error stands above.")
        sections = ["learning"] if options.learning else options.only.split(",")
        for section in sections:
            if section in ("speed", "ray"):
                backend = "local" if section == "speed" else "ray"
                found = speed(folder, backend, options.rounds, options.steps, options.prompts)
            elif section == "driver":
                found = driver(folder, options.rounds, options.steps)
            elif section == "slow":
                found = slow(f"{folder}/letters", 1)
            elif section == "memory":
                found = memory(folder)
            elif section == "learning":
                found = learning(f"{folder}/letters", options.seeds, options.learning_steps)
            else:
                sys.exit(f"--only {section}: there are speed, ray, driver, slow, memory.")
            found = {f"{section}: {key}": value for key, value in found.items()}
            show(found, judge(found))
            figures |= found

    if options.json:
        text = json.dumps({"figures": figures, "limits": judge(figures)}, indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
