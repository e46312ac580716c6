"""What overlapping the updates saved, from two run folders: split, and colocated.

    python compare.py SPLIT COLOCATE

Both have as many ranks a role; `run_deepseek7b_llm.sh` makes them with TINY=1. The first step of
each run warms up and is left out.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import yaml


def medians(folder: Path) -> dict[str, float]:
    """The median over the steps after the first of every metric of the last one."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        sys.exit(f"{folder} is no run folder: there is no {metrics}. Give those of the two runs.")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if "timing_s/step" in line]
    steps = steps[1:] or steps
    return {name: statistics.median(step.get(name, 0.0) for step in steps) for name in steps[-1]}


def processes(folder: Path) -> str:
    """`2 processes`: those of all pools of the run."""
    pools = yaml.safe_load((folder / "config.yaml").read_text())["resource_pool_spec"]
    total = sum(sum(per_node) for per_node in pools.values())
    return f"{total} process{'' if total == 1 else 'es'}"


def main(split_dir: str, colocate_dir: str) -> None:
    """Print update phase, actor and critic alone, overlap and whole steps."""
    split, colocate = medians(Path(split_dir)), medians(Path(colocate_dir))
    actor, critic = colocate["timing_s/update_actor"], colocate["timing_s/update_critic"]
    wall = split["timing_s/update"]
    print(
        f"update phase, split over two pools      {wall:.3f} s\nactor alone {actor:.3f} s + "
        f"critic alone {critic:.3f} s = {actor + critic:.3f} s\nthe update phase takes "
        f"{wall / (actor + critic):.2f} of that\nperf/overlap_ratio                      "
        f"{split['perf/overlap_ratio']:.2f} (1 in turns, 2 side by side)\na whole step            "
        f"                {split['timing_s/step']:.3f} s on "
        f"{processes(Path(split_dir))}, {colocate['timing_s/step']:.3f} s in turns on "
        f"{processes(Path(colocate_dir))}"
    )
    print(f"timeline and curves: {split_dir}/report.html")


if __name__ == "__main__":
    main(*sys.argv[1:])
