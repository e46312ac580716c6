"""Compare asynchronous PPO with synchronous PPO, and with its generators and its trainer alone.

    python benchmarks/bench_async.py [--only speed,ray,driver,slow] [--json FILE]
        [--rounds 8] [--most-stolen 1] [--window 10] [--prompts 16] [--layers 2] [--critic-layers 2]

The script prints a table, and which limits hold.

Every side (`async_side.py`) is a separate process with one thread. All sides are started. In every
round, each runs a window of steps while the others pause (`paused_sides.py`), so if the machine is
slow for minutes, all sides are equally slow. A rate is the samples per second of a window without
its first `SETTLE` steps, because generators continue for one batch when a trainer pauses. Results
are medians over rounds, of rates and of ratios of two rates of one round. Each round is printed
when it ends. A round is discarded if other virtual machines took more than `--most-stolen` of the
cores' time, as counted by the kernel.

- `speed`: `backend=local`, whose generators are child processes
- `ray`: the same on Ray, with one cluster for all sides
- `driver`: the fraction of a core that the driver uses on Ray, by thread, next to what Ray alone
  uses for the same calls without work

Run it on an idle machine with two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from async_side import LAST, NUM_PROMPTS, NUM_SAMPLES, WARM_UP
from paused_sides import (
    Facts,
    PausedSide,
    answer,
    cluster_for_all,
    core_ticks,
    share_stolen,
    start,
)
from sides import HERE

BARE_DRIVER = str(HERE / "bare_driver_side.py")
STEPS = 20
"""Steps of a run that does not pause."""
MOST_TRIES = 3
"""Maximum number of rounds that are run for each round that counts."""
DRIVER_ROUNDS = 2
ALONE = ("generators_alone", "trainer_alone")
SIDES = {
    "local": ("synchronous", "staleness_0", "staleness_1", "staleness_4", *ALONE),
    "ray": ("synchronous", "split", "staleness_1", "critic_apart", *ALONE),
}
"""With `placement=split`, the rollout is next to the actor, and the critic is in another pool; only
Ray overlaps them. `critic_apart` is staleness 1 with this placement.
"""
LIMITS: dict[str, tuple[str, float]] = {
    "staleness 1 over the synchronous run": (">=", 1.3),
    "staleness 1 over placement=split": (">=", 1.3),
    "staleness 1 over placement=split, critic apart in both": (">=", 1.3),
    "staleness 1 over the slower side alone": (">=", 0.85),
    "driver, share of a core": ("<=", 0.05),
    "slow samples and update over serial": ("<=", 0.75),
    "slow weights and update over serial": ("<=", 0.75),
}


def driver_share(facts: Facts) -> float:
    """Return the fraction of a core that the driver's process uses."""
    ended, used = facts["ended"], facts["cpu_s"]
    return (used[-1] - used[0]) / (ended[-1] - ended[0])


def rates_at_once(sides: dict[str, PausedSide], alone: dict[str, float]) -> dict[str, float]:
    """Run generators and trainer alone, but concurrently: how much they slow each other down.

    Rates cover the time in which both run. If generators are faster according to `alone`, they run
    more steps. The trainer has batches for only one window; preparing more would take part of the
    time.
    """
    generators, trainer = (alone[name] for name in ALONE)
    for name, windows in zip(ALONE, (math.ceil(generators / trainer), 1), strict=True):
        sides[name].begin(windows)
    ended = {name: sides[name].end()["ended"] for name in alone}
    begin = max(times[0] for times in ended.values())
    end = min(times[-1] for times in ended.values())
    rates = {}
    for name, times in ended.items():
        within = [time for time in times if begin <= time <= end]
        rates[f"{name} at once"] = sides[name].rate(within)
    return rates


def speed(folder: str, backend: str, options: argparse.Namespace) -> dict[str, float]:
    """Return the samples per second of every side, and the ratios of staleness 1 to them."""
    with cluster_for_all() if backend == "ray" else nullcontext() as cluster:
        return speed_in(cluster, folder, options)


def speed_in(cluster: str | None, folder: str, options: argparse.Namespace) -> dict[str, float]:
    """Run `speed` in this Ray cluster, or on the local backend."""
    backend = "local" if cluster is None else "ray"
    rates: dict[str, list[float]] = defaultdict(list)
    shares: list[float] = []
    lengths: list[float] = []
    sides = {name: PausedSide(name, folder, cluster, options) for name in SIDES[backend]}
    for side in sides.values():
        side.end()

    for number in range(MOST_TRIES * options.rounds):
        begun = core_ticks()
        # every other round in reverse order, so that a machine that slows down favors no side
        facts_of, of_round = one_round(sides, list(sides)[:: 1 if number % 2 else -1])
        stolen = share_stolen(begun)
        counts = stolen <= options.most_stolen
        seen = ", ".join(f"{name} {rate:.1f}" for name, rate in of_round.items())
        taken = f"other machines took {stolen:.1%} of the cores"
        verdict = "" if counts else ": it does not count"
        print(f"{backend}, round {number + 1}: {seen} samples/s; {taken}{verdict}", file=sys.stderr)
        if not counts:
            continue
        for name, rate in of_round.items():
            rates[name].append(rate)
        for facts in facts_of.values():
            lengths += [length for length in facts["length"] if length]
        shares.append(driver_share(facts_of["staleness_1"]))
        if len(shares) == options.rounds:
            break
    for side in sides.values():
        side.close()
    if len(shares) < 2:
        sys.exit("fewer than two rounds were quiet enough. Raise --most-stolen or --rounds.")

    results = {"rounds that count": float(len(shares))}
    results |= {f"{name}, samples/s": statistics.median(of) for name, of in rates.items()}
    results["mean length, tokens"] = statistics.mean(lengths)
    results |= compared(rates)
    if backend == "ray":  # on the local backend, the driver is also the trainer
        results["driver, share of a core"] = statistics.median(shares)
    return results


def one_round(
    sides: dict[str, PausedSide], order: Sequence[str]
) -> tuple[dict[str, Facts], dict[str, float]]:
    """Return what each side measured in a window, and the samples per second."""
    facts_of: dict[str, Facts] = {}
    rates: dict[str, float] = {}
    for name in order:
        sides[name].begin()
        facts_of[name] = sides[name].end()
        rates[name] = sides[name].rate(facts_of[name]["ended"])
    rates |= rates_at_once(sides, {name: rates[name] for name in ALONE})
    return facts_of, rates


def compared(rates: dict[str, list[float]]) -> dict[str, float]:
    """Return the ratios of staleness 1 to the other rates: median and quartiles over rounds.

    Both rates of a ratio are from the same round, in which the machine was equally fast for both.
    """
    pairs = {
        "staleness 1 over the synchronous run": ("staleness_1", "synchronous"),
        "staleness 1 over placement=split": ("staleness_1", "split"),
        "staleness 1 over placement=split, critic apart in both": ("critic_apart", "split"),
        "staleness 1 over the slower side alone": ("staleness_1", slower_of(rates, ALONE)),
    }
    at_once = slower_of(rates, [f"{name} at once" for name in ALONE])
    pairs["staleness 1 over the slower side, both at once"] = ("staleness_1", at_once)
    results = {}
    for key, (name, other) in pairs.items():
        if other in rates:
            ratios = [a / b for a, b in zip(rates[name], rates[other], strict=True)]
            first, results[key], third = statistics.quantiles(ratios, n=4, method="inclusive")
            results[f"{key}, first quartile"] = first
            results[f"{key}, third quartile"] = third
    return results


def slower_of(rates: dict[str, list[float]], names: Sequence[str]) -> str:
    """Return the side with the lower median rate."""
    return min(names, key=lambda name: statistics.median(rates[name]))


def driver(folder: str, rounds: int) -> dict[str, float]:
    """Return the CPU milliseconds of the driver's process per step on Ray, by kind of thread.

    Other work on the machine raises them, but far less than it raises wall times.
    """
    results: dict[str, list[float]] = {}
    for prompts in (NUM_PROMPTS, 4 * NUM_PROMPTS):
        samples = prompts * NUM_SAMPLES
        for _ in range(rounds):
            facts = answer(start("staleness_1", folder, "ray", str(STEPS), str(prompts)))
            taken = [key for key in facts if key.startswith("cpu_s of ")]
            ms = {key: 1e3 * (facts[key][1] - facts[key][0]) for key in taken}
            for key, value in {"all": sum(ms.values()), **ms}.items():
                row = f"{samples} samples: {key.removeprefix('cpu_s of ')}, ms a step"
                results.setdefault(row, []).append(value / (STEPS - LAST - WARM_UP))
    for _ in range(rounds):
        bare = answer(start(script=BARE_DRIVER))
        results.setdefault("64 samples: Ray alone, idle, ms a step", []).append(bare["ms"])
        results.setdefault("64 samples: Ray alone, idle, share of a core", []).append(bare["share"])
    return {row: statistics.median(values) for row, values in results.items()}


def slow(folder: str) -> dict[str, float]:
    """Compare twenty steps with a slow send and a slow update: overlapped and sequential."""
    results = {}
    for payload in ("samples", "weights"):
        seconds = []
        for staleness in (0, 1):
            ended = answer(start(f"slow_{payload}_{staleness}", folder, "local", "21"))["ended"]
            seconds.append(ended[-1] - ended[0])
        serial, overlapped = seconds
        results |= {
            f"20 steps one after the other, slow {payload}, s": serial,
            f"20 steps overlapped, slow {payload}, s": overlapped,
            f"slow {payload} and update over serial": overlapped / serial,
        }
    return results


def judge(figures: dict[str, float]) -> dict[str, dict[str, Any]]:
    """Return the limits on the measured values, and whether they hold."""
    results = {}
    for key, value in figures.items():
        relation, limit = LIMITS.get(key.split(": ", 1)[-1], ("", 0.0))
        if relation:
            holds = value >= limit if relation == ">=" else value <= limit
            results[key] = {
                "value": round(value, 4),
                "limit": f"{relation} {limit}",
                "holds": holds,
            }
    return results


def show(figures: dict[str, float], limits: dict[str, dict[str, Any]]) -> None:
    """Print one line per value, with its limit if there is one."""
    for key, value in figures.items():
        limit = limits.get(key)
        verdict = ""
        if limit:
            verdict = f"   {limit['limit']}: {'holds' if limit['holds'] else 'DOES NOT HOLD'}"
        print(f"{key:72} {value:10.3f}{verdict}", flush=True)


def main() -> None:
    """Run the selected measurements, then print which limits hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="speed,ray,driver,slow")
    parser.add_argument("--rounds", type=int, default=8, help="2 or more")
    parser.add_argument(
        "--most-stolen",
        type=float,
        default=1.0,
        help="largest fraction of the cores that other machines take in a valid round",
    )
    parser.add_argument("--window", type=int, default=10, help="steps of a side per round")
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS, help="prompts per step")
    parser.add_argument("--layers", type=int, default=2, help="layers of the policy")
    parser.add_argument("--critic-layers", type=int, help="layers of the critic; default: --layers")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds needs 2 or more: a median has quartiles.")

    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        layers = options.layers, options.critic_layers or options.layers
        answer_of_make = start("make", folder, *map(str, layers))
        if answer_of_make.wait():
            sys.exit("the tiny model could not be written: the error is above.")
        for section in options.only.split(","):
            if section in ("speed", "ray"):
                backend = "local" if section == "speed" else "ray"
                results = speed(folder, backend, options)
            elif section == "driver":
                results = driver(folder, DRIVER_ROUNDS)
            elif section == "slow":
                results = slow(f"{folder}/letters")
            else:
                sys.exit(f"--only {section}: choose speed, ray, driver or slow.")
            results = {f"{section}: {key}": value for key, value in results.items()}
            show(results, judge(results))
            figures |= results

    if options.json:
        text = json.dumps({"figures": figures, "limits": judge(figures)}, indent=2)
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
