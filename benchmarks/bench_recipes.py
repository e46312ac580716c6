"""Compare a step of SFT, of reward-model training and of DPO with TRL.

    python benchmarks/bench_recipes.py --trl-python PATH [--rounds 2] [--only sft,reward_model,dpo]

PATH is the Python of an environment with TRL 1.16 and the same torch. A step trains a Qwen2 with
one million parameters on 64 rows (or pairs), in float32 on one thread; `recipes_side.py` defines
the step. Each side runs in its own process, one after the other. Results are medians over rounds of
the median over steps. verl-like runs with and without `model.compile=on`. TRL's SFT runs with its
defaults and with `padding_free`; the faster one counts. All sides train from the same weights on
the same rows, so the losses of all steps must agree. Prints a table with the limits, and the
results as JSON; exits with 1 if a limit is missed. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from typing import Any

from sides import HERE, ask

SIDE = str(HERE / "recipes_side.py")
KINDS = ("full", "tailed")
OURS = ("ours", "compiled")
SIDES = {
    "sft": (*OURS, "trl", "trl_free"),
    "reward_model": (*OURS, "trl"),
    "dpo": (*OURS, "trl"),
}
TIMES_TRL = {"full": 1.2, "tailed": 1.5}
"""Kind of rows -> minimum speedup of a step over TRL."""
LOSSES_APART = 1e-5
"""Largest allowed difference of a step's loss from TRL's."""
Answer = dict[str, dict[str, Any]]
"""Kind of rows -> `step_s`, `losses`."""


def losses_apart(first: Answer, second: Answer, kind: str) -> float:
    """Return the largest difference between the losses of a step."""
    pairs = zip(first[kind]["losses"], second[kind]["losses"], strict=True)
    return max(abs(left - right) for left, right in pairs)


def compare(
    recipe: str, rounds: list[dict[str, Answer]], figures: dict[str, dict[str, float]]
) -> list[str]:
    """Print the recipe's lines of the table, and add its `figures`; return the limits missed."""
    missed = []
    for kind in KINDS:
        wall = {
            side: statistics.median(r[side][kind]["step_s"] for r in rounds)
            for side in SIDES[recipe]
        }
        others = [side for side in SIDES[recipe] if side not in OURS]
        fastest = min(others, key=lambda side: wall[side])
        times = wall[fastest] / wall["ours"]
        compiled_times = wall[fastest] / wall["compiled"]
        apart = max(
            losses_apart(r[our], r[side], kind) for r in rounds for our in OURS for side in others
        )

        limit = TIMES_TRL[kind]
        name = f"{recipe}, {kind} rows"
        columns = ("ours", "compiled", "trl", "trl_free")
        shown = " ".join(f"{wall.get(side, 0):>8.3f}" for side in columns)
        row = f"{name:<26}{shown} {times:>8.2f} >= {limit} {compiled_times:>8.2f}"
        row += f"{apart:>12.1e}"
        print(row, flush=True)
        figures[name] = {"times": times, "losses_apart": apart}
        figures[name]["compiled_times"] = compiled_times
        figures[name] |= {f"{side}_s": seconds for side, seconds in wall.items()}
        if times < limit:
            missed.append(f"{name}: {times:.2f} times as fast as TRL, wanted {limit}")
        if apart > LOSSES_APART:
            missed.append(
                f"{name}: losses are {apart:.1e} apart, wanted {LOSSES_APART:.0e} at most"
            )
    return missed


def main() -> None:
    """Measure, print the table, and print which limits are missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trl-python", required=True, help="Python of an environment with TRL 1.16"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default=",".join(SIDES))
    options = parser.parse_args()

    missed: list[str] = []
    figures: dict[str, dict[str, float]] = {}
    print(
        f"{'seconds of a step':<26}{'ours':>8} {'compiled':>8} {'trl':>8} {'pad.free':>8}", end=""
    )
    print(f"{'times':>9} wanted compiled losses apart")
    with tempfile.TemporaryDirectory() as folder:
        ask(sys.executable, SIDE, "make", folder)
        for recipe in options.only.split(","):
            rounds = []
            for _ in range(options.rounds):
                answers = {}
                for side in SIDES[recipe]:
                    python = sys.executable if side in OURS else options.trl_python
                    answers[side] = ask(python, SIDE, side, folder, recipe)
                rounds.append(answers)
            missed += compare(recipe, rounds, figures)
    print(json.dumps(figures, indent=1))
    sys.exit("\n".join(missed) or None)


if __name__ == "__main__":
    main()
