"""What the planner says of numbers that others have published.

    python benchmarks/bench_plan.py [file ...]

Nothing is run but the planner. Prints JSON: for every file of `published/`, or those named, its
source, a summary, and a row for every number (`plan_cases`).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from plan_cases import KINDS, Case, Folders

PUBLISHED = Path(__file__).with_name("published")
NEAR = 1.15
"""Ratio up to which a prediction is called near, either way."""


def summary(rows: Sequence[Case]) -> dict[str, str]:
    """What is predicted -> how many of its rows agree or are near, and the farthest."""
    found = {}
    for of in dict.fromkeys(row["of"] for row in rows):
        own = [row for row in rows if row["of"] == of and "fitted" not in row]
        if not own:
            continue
        if "agrees" in own[0]:
            found[of] = f"{sum(row['agrees'] for row in own)} of {len(own)} agree"
            continue
        found[of] = f"{_near(own)} of {len(own)} within 15 %"
        alike = [row for row in own if "why" not in row]
        if len(alike) < len(own):
            found[of] += f" ({_near(alike)} of {len(alike)} where nothing is known to differ)"
        known = [row for row in own if row["ratio"] is not None]
        if known:
            worst = max(known, key=lambda row: max(row["ratio"], 1 / row["ratio"]))
            found[of] += f", at most x {worst['ratio']} ({worst['case']})"
    return found


def _near(rows: Sequence[Case]) -> int:
    return sum(row["ratio"] is not None and 1 / NEAR <= row["ratio"] <= NEAR for row in rows)


def main(names: Sequence[str]) -> None:
    """Compare all that is published, or these files of it."""
    torch.set_num_threads(1)
    result = {}
    for file in sorted(PUBLISHED.glob("*.json")):
        if names and file.stem not in names:
            continue
        published = json.loads(file.read_text())
        with tempfile.TemporaryDirectory() as folder:
            rows = KINDS[published["kind"]](published, Folders(Path(folder)))
        result[file.stem] = {
            "source": published["source"],
            "summary": summary(rows),
            "rows": rows,
        }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
