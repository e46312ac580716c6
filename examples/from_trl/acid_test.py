"""Make a run of TRL and a run of verl-like coincide, with what `migrate` and `bisect` print.

    TRL_PYTHON=trl-venv/bin/python python examples/from_trl/acid_test.py --model smollm2 --out acid

It trains with TRL, translates the recorded trainer, trains with the translated command, and repeats
its steps with TRL's samples. Then it prints a table of loss, gradient norm and weights of both, and
exits with 0 if they agree to 1e-4. TRL_PYTHON is the Python of an environment
with TRL 1.16.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
CODE = "from trainer.cli.main import main; main()"
"""Runs `verl-like` in this Python."""
LIMIT = 1e-4
"""Largest relative difference."""
LEAST = 0.1
"""Losses below this are compared as if they had this size: their terms have size 1 and cancel."""


def main() -> None:
    """Run both frameworks, and compare them."""
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("settings", nargs="*", help="further settings of verl-like")
    options = parser.parse_args()
    trl_python = os.environ.get("TRL_PYTHON")
    if not trl_python:
        sys.exit("TRL_PYTHON is not set: it is the Python of an environment with TRL 1.16.")
    model, out = options.model.resolve(), options.out.resolve()
    out.mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    in_trl = {**environment, "PYTHONPATH": str(REPOSITORY)}
    script = [str(HERE / "train_grpo.py"), str(model), str(out / "trl"), str(options.steps)]
    run([trl_python, *script], out, in_trl)

    command = translated(out / "trl/record")
    command += ["trainer.record=all", "trainer.threads_per_process=1", *options.settings]
    command += [f"trainer.default_local_dir={out / 'ours'}"]
    run(command, out, environment)
    sides = [f"trl:{out / 'trl/record'}", str(out / "ours")]
    code = run(
        ["verl-like", "bisect", *sides, "--force", "--keep", str(out / "forced")], out, environment
    )
    if code == 2:
        sys.exit("bisect could not compare the runs")
    worst = show(steps_of(out / "trl/record"), steps_of(out / "forced"))
    sys.exit(f"they differ by {worst:.1e}" if worst > LIMIT else 0)


def translated(record: Path) -> list[str]:
    """Return the command that `verl-like migrate` prints: the words before the first empty line."""
    words = [sys.executable, "-c", CODE, "migrate", "trl", str(record)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    printed = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    command = printed.stdout.partition("\n\n")[0]
    return shlex.split(command.replace("\\\n", " "), comments=True)


def run(command: list[str], folder: Path, environment: dict[str, str]) -> int:
    """Run a command, and print it first; end if it fails, except for `bisect`."""
    print(f"$ {shlex.join(command)}", flush=True)
    if command[0] == "verl-like":
        command = [sys.executable, "-c", CODE, *command[1:]]
        environment = {**environment, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, cwd=folder, env=environment)
    if done.returncode and "bisect" not in command:
        sys.exit(done.returncode)
    return done.returncode


def steps_of(record: Path) -> dict[int, dict[str, Any]]:
    """Return the numbers of each recorded step."""
    with (record / "steps.jsonl").open(encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return {line["step"]: line for line in lines if "step" in line}


def show(theirs: dict[int, dict[str, Any]], ours: dict[int, dict[str, Any]]) -> float:
    """Print a table of both sides, and return the largest relative difference."""
    print("step|loss of TRL|loss here|gradient norm of TRL|gradient norm here|weights")
    worst = 0.0
    for step in sorted(theirs.keys() & ours.keys()):
        a, b = theirs[step], ours[step]
        if step == 0:
            continue
        numbers = [side[name] for name in ("loss", "grad_norm") for side in (a, b)]
        apart = weight_difference(a, b)
        print("|".join([str(step), *(f"{x:.7f}" for x in numbers), f"{apart:.1e}"]))
        pairs = (numbers[:2], numbers[2:])
        worst = max([worst, apart, *(abs(x - y) / max(abs(x), LEAST) for x, y in pairs)])
    return worst


def weight_difference(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Return the relative difference of all weights, estimated from their projections."""
    norms = a["weight_norms"]
    gaps = [
        (a["weight_projections"][name] - b["weight_projections"][name]) * norms[name]
        for name in norms
    ]
    return math.hypot(*gaps) / math.hypot(*norms.values())


if __name__ == "__main__":
    main()
