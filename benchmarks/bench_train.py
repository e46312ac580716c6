"""Compare the training engine with a matrix product, padded rows, several ranks, and TRL.

    python benchmarks/bench_train.py [--trl-python PATH] [--ranks-only] [--rounds 3]

PATH is the Python of an environment with TRL 1.16; without it, TRL is left out. `--ranks-only` only
compares one rank, two FSDP ranks, and two ranks with strategy ddp. Each side runs in its own
process with one thread, one after the other, on the same rows. Results are medians over rounds.
Prints JSON with the limits that are missed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SIDE = Path(__file__).with_name("train_side.py")
LIMITS = {
    "float32_share": (">=", 0.75),
    "packed over padded, real tokens 40 % of the width": ("<=", 0.5),
    "2 ranks over 1, seconds": ("<=", 0.65),
    "over_the_logits_mib": ("<=", 64.0),
    "times TRL, full rows": (">=", 1.2),
    "times TRL, tailed rows": (">=", 2.5),
}
ENV = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": str(SIDE.resolve().parents[1]),
}


def start(python: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start a side in a new process."""
    return subprocess.Popen(
        [python, str(SIDE), *arguments], env=ENV | environment, stdout=subprocess.PIPE, text=True
    )


def answer(process: subprocess.Popen[str]) -> dict[str, float]:
    """Return the JSON that a side printed last."""
    output, _ = process.communicate(timeout=1800)
    if process.returncode:
        raise SystemExit(f"{process.args} failed with {process.returncode}")
    result: dict[str, float] = json.loads(output.strip().splitlines()[-1]) if output.strip() else {}
    return result


def on_ranks(folder: str, world_size: int, strategy: str) -> dict[str, float]:
    """Return the values of the slowest rank."""
    from torch.distributed import TCPStore

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    common = {
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }
    processes = [
        start(sys.executable, "ranks", folder, strategy, RANK=str(r), LOCAL_RANK=str(r), **common)
        for r in range(world_size)
    ]
    answers = [answer(process) for process in processes]
    return {name: max(a[name] for a in answers) for name in answers[0]}


def compare_ranks(folder: str) -> dict[str, float]:
    """Compare one rank, two ranks of FSDP and two of ddp, one after the other."""
    sides = {"1 ranks": (1, "fsdp"), "2 ranks": (2, "fsdp"), "2 ranks of ddp": (2, "ddp")}
    answers = {side: on_ranks(folder, *arguments) for side, arguments in sides.items()}
    results = {}
    for side, figures in answers.items():
        results |= {f"{side}, {name}": value for name, value in figures.items()}

    for side in ("2 ranks", "2 ranks of ddp"):
        results[f"{side} over 1, seconds"] = (
            results[f"{side}, update_s"] / results["1 ranks, update_s"]
        )
        share = results[f"{side}, state_mib"] / results["1 ranks, state_mib"]
        results[f"{side} over 1, memory of a rank"] = share
    return results


def one_round(folder: str, trl_python: str | None) -> dict[str, float]:
    """Make every comparison once, its sides one after the other."""
    results: dict[str, float] = {}
    sides = [("ours", sys.executable), ("padded", sys.executable)]
    if trl_python:
        sides.append(("trl", trl_python))
    for kind in ("full", "tailed", "ragged"):
        for side, python in sides:
            results[f"{side}, {kind} rows, s"] = answer(start(python, side, folder, kind))[
                "update_s"
            ]

    results |= answer(start(sys.executable, "rate", folder))
    results |= answer(start(sys.executable, "memory", folder))
    results |= compare_ranks(folder)
    results["packed over padded, real tokens 40 % of the width"] = (
        results["ours, ragged rows, s"] / results["padded, ragged rows, s"]
    )
    if trl_python:
        for kind in ("full", "tailed"):
            results[f"times TRL, {kind} rows"] = (
                results[f"trl, {kind} rows, s"] / results[f"ours, {kind} rows, s"]
            )
    return results


def main() -> None:
    """Parse the command line, and run the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl-python", help="the Python of an environment with TRL 1.16")
    parser.add_argument("--ranks-only", action="store_true", help="only compare one and two ranks")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        answer(start(sys.executable, "make", folder))
        rounds = [
            compare_ranks(folder) if args.ranks_only else one_round(folder, args.trl_python)
            for _ in range(args.rounds)
        ]

    figures = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    missed = []
    for name, (sign, limit) in LIMITS.items():
        value = figures.get(name)
        if value is not None and not (value <= limit if sign == "<=" else value >= limit):
            missed.append(f"{name} is {value:.3g}, wanted {sign} {limit:g}")
    report: dict[str, Any] = {
        "figures": {name: round(value, 4) for name, value in figures.items()},
        "missed": missed,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
