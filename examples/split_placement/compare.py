"""Compare a split run with a colocated run: their metrics, and the time that overlap saved.

    python compare.py SPLIT COLOCATE

`run_deepseek7b_llm.sh` with TINY=1 makes both runs; the colocated one may be shorter. Times are
medians without the first step of each run, which is a warm-up.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

import yaml

NUMBERS = ("critic/score/mean", "actor/pg_loss", "critic/vf_loss", "actor/grad_norm")
"""Metrics that must not depend on the placement."""


def steps_of(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of every training step."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        sys.exit(
            f"{folder} is not a run folder: there is no {metrics}. Pass the folders of the two "
            "runs."
        )
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line for line in lines if "timing_s/step" in line]


def processes(folder: Path) -> str:
    """Return the number of processes in all pools of the run, such as `2 processes`."""
    pools = yaml.safe_load((folder / "config.yaml").read_text())["resource_pool_spec"]
    total = sum(sum(per_node) for per_node in pools.values())
    return f"{total} process{'' if total == 1 else 'es'}"


def seconds(steps: list[dict[str, float]], name: str) -> float:
    """Return the median of a metric over the steps after the first."""
    return statistics.median(step[name] for step in steps[1:] or steps)


def largest_difference(split: list[dict[str, float]], colocate: list[dict[str, float]]) -> float:
    """Return the largest difference of the metrics `NUMBERS` over the steps that both runs have."""
    pairs = zip(split, colocate, strict=False)
    return max(abs(first[name] - other[name]) for first, other in pairs for name in NUMBERS)


def main(split_dir: str, colocate_dir: str) -> None:
    """Print how the reward changed, whether the metrics agree, and both times."""
    split, colocate = steps_of(Path(split_dir)), steps_of(Path(colocate_dir))
    rewards = [step["critic/score/mean"] for step in split]
    shown = [rewards[index * (len(rewards) - 1) // 7] for index in range(8)]
    apart, common = largest_difference(split, colocate), min(len(split), len(colocate))
    wall, actor, critic = (
        seconds(split, "timing_s/update"),
        seconds(colocate, "timing_s/update_actor"),
        seconds(colocate, "timing_s/update_critic"),
    )
    print(
        f"reward over {len(rewards)} steps: {' '.join(f'{reward:.2f}' for reward in shown)}\n"
        f"reward, losses and gradients of the first {common} steps, split and in turns: "
        f"{'the same to the last bit' if apart == 0 else f'apart by {apart:.1e} at most'}\n"
        f"update phase, split over two pools      {wall:.3f} s\n"
        f"actor alone {actor:.3f} s + critic alone {critic:.3f} s = {actor + critic:.3f} s\n"
        f"the update phase takes {wall / (actor + critic):.2f} of that\n"
        f"perf/overlap_ratio                      {seconds(split, 'perf/overlap_ratio'):.2f} "
        f"(1 in turns, 2 side by side)\n"
        f"a whole step                            {seconds(split, 'timing_s/step'):.3f} s on "
        f"{processes(Path(split_dir))}, {seconds(colocate, 'timing_s/step'):.3f} s in turns on "
        f"{processes(Path(colocate_dir))}\n"
        f"timeline and curves: {split_dir}/report.html"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
