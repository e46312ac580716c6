"""Which tests and cases `--sample` keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.sample_of_cases import sampled

MATRIX = [f"tests/a.py::test_matrix[{case}]" for case in range(20)]
SINGLE = ["tests/a.py::test_one", "tests/b.py::test_two[0]", "tests/b.py::test_two[1]"]


def item(name: str) -> Any:
    return SimpleNamespace(
        nodeid=name, get_closest_marker=lambda marker: marker if marker in name else None
    )


def kept(seed: str, names: list[str]) -> list[str]:
    items = [item(name) for name in names]
    chosen, left_out = sampled(items, seed)
    assert len(chosen) + len(left_out) == len(names)
    return [item.nodeid for item in chosen]


def test_every_test_keeps_one_of_five_cases_or_its_only_one() -> None:
    names = kept("1", [*MATRIX, *SINGLE])
    assert len(names) == 4 + 2
    assert names[-2] == SINGLE[0]
    assert names[-1] in SINGLE[1:]


def test_long_tests_are_left_out() -> None:
    assert kept("1", [SINGLE[0], "tests/a.py::test_a_long_wait"]) == SINGLE[:1]


def test_a_seed_chooses_the_same_cases_in_every_process_and_seeds_reach_all_cases() -> None:
    assert kept("7", MATRIX) == kept("7", [SINGLE[0], *MATRIX])[-4:]
    assert {name for seed in range(40) for name in kept(str(seed), MATRIX)} == set(MATRIX)
