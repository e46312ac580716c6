"""The planner beside numbers that others have published: the data, and cases that are quick."""

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
    found: Case = json.loads((ROOT / f"benchmarks/published/{name}.json").read_text())
    return found


def rows_of(published: Case, folder: Path) -> list[Case]:
    found: list[Case] = BENCH.KINDS[published["kind"]](published, BENCH.Folders(folder))
    return found


def quantities(case: Case) -> set[str]:
    """What a case has numbers of, as rows call it."""
    seconds = case.get("seconds")
    of_stages = seconds if isinstance(seconds, dict) else {}
    found = {f"seconds of {stage}" for stage in of_stages}
    found |= {"seconds"} if "tokens_per_second" in case or isinstance(seconds, float) else set()
    return found | {"GiB", "placement"} & set(case) | ({"cards"} if not found else set())


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_a_file_of_published_numbers_says_where_they_are_from(file: Path) -> None:
    published = json.loads(file.read_text())
    assert published["kind"] in BENCH.KINDS
    assert any(word in published["source"] for word in ("https://github.com/", "arXiv"))
    for case in published["cases"]:
        models = {case.get("model", published.get("model")), case.get("values", case.get("model"))}
        assert models - {None} <= set(published["models"]), case
        assert set(case.get("why", ())) <= quantities(case), case
        assert case["gpus"] > 0


@pytest.mark.parametrize("name", ["prime_rl", "torchtitan"])
def test_a_family_is_fitted_to_two_steps_at_most_and_predicts_others(name: str) -> None:
    cases = read(name)["cases"]
    assert len({case["name"] for case in cases}) == len(cases)
    families = {case["family"] for case in cases}
    for family in families:
        of = [case for case in cases if case["family"] == family]
        assert 1 <= sum("fits" in case for case in of) <= 2


def test_the_planner_agrees_with_the_published_best_placement_of_a_case(tmp_path: Path) -> None:
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
    (row,) = rows_of({**published, "cases": [first], "networks": {"one": 25e9}}, tmp_path)
    assert (row["predicted"], row["agrees"]) == ("colocate", True)


def test_steps_of_other_cards_follow_from_two_of_a_family(tmp_path: Path) -> None:
    published = read("prime_rl")
    cases = [c for c in published["cases"] if c["family"] == "4B full Hopper" and "why" not in c]
    rows = rows_of({**published, "cases": cases}, tmp_path)
    fitted = [row for row in rows if "fitted" in row]
    predicted = [row for row in rows if row["of"] == "seconds" and "fitted" not in row]
    assert [row["ratio"] for row in fitted] == pytest.approx([1, 1], abs=1e-3)
    assert len(predicted) == 2
    assert [row["ratio"] for row in predicted] == pytest.approx([1, 1], rel=0.15)
    peaks = [row["ratio"] for row in rows if row["of"] == "GiB"]
    assert peaks == pytest.approx([1] * 4, rel=0.1)


def test_a_summary_counts_what_was_not_fitted() -> None:
    row = {"case": "a", "of": "seconds", "ratio": 1.1}
    rows = [row, row | {"ratio": 1.0, "fitted": True}, row | {"ratio": 0.5, "why": "other kernels"}]
    text = "1 of 3 within 15 % (1 of 2 where nothing is known to differ), at most x 0.5 (a)"
    assert BENCH.summary([*rows, row | {"ratio": None}]) == {"seconds": text}
