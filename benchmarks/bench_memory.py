"""Compare the bytes that the memory model predicts for a role with the bytes of its tensors.

    python benchmarks/bench_memory.py [--only TEXT]

Every case of `memory_side.py` builds a role's worker on its ranks, runs its calls, and counts the
bytes from torch's allocator: those kept between calls, and the peak of a call in addition. The rank
with the most bytes counts. Prints a line per case, and then JSON; `missed` lists the cases that are
off by more than 10 %.
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
"""Bounds of the ratio of predicted to measured bytes."""


def largest(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the results of the rank with the most bytes, with the ratio of each part."""
    results = max(ranks, key=lambda rank: sum(rank[part]["measured"] for part in PARTS))
    for part in PARTS:
        both = results[part]
        both["ratio"] = round(both["predicted"] / both["measured"], 3)
    return results


def main() -> None:
    """Run the cases one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run names with this part")
    options = parser.parse_args()
    result: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        make_models(Path(folder))
        for name, case in CASES.items():
            if options.only in name:
                result[name] = largest(ask_ranks(case.num_ranks, str(SIDE), folder, name))
                outcome = (
                    f"{part} {result[name][part]['measured'] / 2**20:7.1f} MiB, "
                    f"predicted {result[name][part]['ratio']:.2f}"
                    for part in PARTS
                )
                print(f"{name:40} {'; '.join(outcome)}", file=sys.stderr, flush=True)
    missed = {
        f"{name}: {part}": results[part]["ratio"]
        for name, results in result.items()
        for part in PARTS
        if not LEAST <= results[part]["ratio"] <= MOST
    }
    print(json.dumps({"found": result, "missed": missed}, indent=2))


if __name__ == "__main__":
    main()
