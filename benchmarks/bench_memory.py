"""The bytes that the one model of memory predicts for a role, beside those of its tensors.

    python benchmarks/bench_memory.py [--only TEXT]

Every case of `memory_side.py` builds a role's worker on its ranks, runs its calls, and counts what
torch's allocator gave out: kept between calls, and the most that a call takes on top. The rank that
takes the most counts. Prints a line a case, then JSON; `missed` are cases off by more than 10 %.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from memory_side import CASES, make_models
from sides import HERE, ask_ranks

SIDE = HERE / "memory_side.py"
PARTS = ("kept", "call")
LEAST, MOST = 0.9, 1.1
"""Bounds of predicted over measured bytes."""


def largest(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the rank with the most bytes found, with the ratio of each part."""
    results = max(ranks, key=lambda rank: sum(rank[part]["measured"] for part in PARTS))
    for part in PARTS:
        both = results[part]
        both["ratio"] = round(both["predicted"] / both["measured"], 3)
    return results


def main() -> None:
    """Run the cases in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names to run")
    options = parser.parse_args()
    result: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        for name, case in CASES.items():
            if options.only in name:
                result[name] = largest(ask_ranks(case.num_ranks, str(SIDE), folder, name))
                said = (
                    f"{part} {result[name][part]['measured'] / 2**20:7.1f} MiB, "
                    f"predicted {result[name][part]['ratio']:.2f}"
                    for part in PARTS
                )
                print(f"{name:40} {'; '.join(said)}", file=sys.stderr, flush=True)
    missed = {
        f"{name}: {part}": results[part]["ratio"]
        for name, results in result.items()
        for part in PARTS
        if not LEAST <= results[part]["ratio"] <= MOST
    }
    print(json.dumps({"found": result, "missed": missed}, indent=2))


if __name__ == "__main__":
    main()
