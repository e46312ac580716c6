"""Compare the scores of two runs: one calls a reward server, the other calls the function itself.

    python compare.py REMOTE IN_PROCESS

The script prints the scores of both runs per step. It exits with 1 if any sample differs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def samples(folder: Path) -> list[list[dict[str, Any]]]:
    """Return the samples of every step, as the run wrote them."""
    files = sorted((folder / "rollouts").glob("*.jsonl"), key=lambda file: int(file.stem))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def main(remote_dir: str, in_process_dir: str) -> None:
    """Print a line per step, then the verdict."""
    remote, in_process = samples(Path(remote_dir)), samples(Path(in_process_dir))
    print("step   mean score, asked over HTTP   mean score, called in process")
    for number, steps in enumerate(zip(remote, in_process, strict=True), 1):
        means = [sum(sample["score"] for sample in step) / len(step) for step in steps]
        print(f"{number:4}   {means[0]:<27.12f}   {means[1]:<.12f}")

    if remote != in_process:
        sys.exit("the samples of the two runs differ")
    num_samples = sum(map(len, remote))
    print(f"the same texts and numbers in all {num_samples} samples of {len(remote)} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
