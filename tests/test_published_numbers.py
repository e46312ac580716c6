"""The planner next to published numbers: the data, and quick cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, load

Case = dict[str, Any]
FILES = sorted((ROOT / "benchmarks/published").glob("*.json"))
BENCH = load("benchmarks/bench_plan.py")


def read(name: str) -> Case:
    published: Case = json.loads((ROOT / f"benchmarks/published/{name}.json").read_text())
    return published


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_a_file_of_published_numbers_names_its_source(file: Path) -> None:
    published = json.loads(file.read_text())
    assert published["kind"] in BENCH.KINDS
    assert any(word in published["source"] for word in ("https://github.com/", "arXiv"))
    for case in published["cases"]:
        models = {case.get("model", published.get("model")), case.get("values", case.get("model"))}
        assert models - {None} <= set(published["models"]), case
        assert case["gpus"] > 0


@pytest.mark.long
def test_the_planner_picks_the_published_best_placement(tmp_path: Path) -> None:
    published = read("hybridflow")
    for case in published["cases"]:
        assert case["placement"] in case.get("tried", published["tried"])
    policy = "actor_rollout_ref"
    pinned = [
        f"{policy}.rollout.tensor_model_parallel_size=2",
        f"{policy}.rollout.gpu_memory_utilization=0.5",
        f"{policy}.actor.parallel.tp=1",
        "critic.parallel.tp=1",
    ]
    first = {**published["cases"][0], "settings": pinned}  # fewer layouts to try
    only = {**published, "cases": [first], "networks": {"one": 25e9}}
    (row,) = BENCH.placements(only, tmp_path)
    assert (row["predicted"], row["agrees"]) == ("colocate", True)


def test_planned_memory_is_near_the_published_peaks(tmp_path: Path) -> None:
    published = read("prime_rl")
    of_size = "4B full 8 x H100"
    cases = [c for c in published["cases"] if "why" not in c and c["name"].startswith(of_size)]
    rows = BENCH.steps({**published, "cases": cases}, tmp_path)
    assert rows
    assert [row["ratio"] for row in rows] == pytest.approx([1] * len(rows), rel=0.12)


def test_a_summary_counts_the_cases_within_15_percent() -> None:
    row = {"case": "a", "of": "GiB", "ratio": 1.1}
    text = "1 of 2 within 15 % (1 of 1 where nothing is known to differ), at most x 0.5 (b)"
    rows = [row, row | {"case": "b", "ratio": 0.5, "why": "other kernels"}]
    assert BENCH.summary(rows) == {"GiB": text}
