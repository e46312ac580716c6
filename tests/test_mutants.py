"""Planted faults change one place of a function, and no message."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.conftest import load

TEXT = '''
LIMIT = 3

@decorated(1)
def largest(rows: list[int] = DEFAULT, *, start: int = 0) -> int:
    """Return 1 of the rows."""
    if len(rows) < 2:
        raise ValueError(f"{len(rows) + 1} rows")
    logger.info("%d", 1 + 2)
    rows.sort()
    return max(rows) + LIMIT
'''


@pytest.fixture(scope="module")
def mutants() -> ModuleType:
    return load("tools/mutants.py")


def test_each_place_of_a_function_can_get_a_fault(mutants: ModuleType) -> None:
    changes = [mutants.planted(TEXT, number)[1] for number in range(mutants.places(TEXT))]
    assert changes == [
        "7: if len(rows) < 2: -> if not len(rows) < 2:",
        "7: len(rows) < 2 -> len(rows) >= 2",
        "7: 2 -> 3",
        "10: rows.sort() -> None",
        "11: max(rows) + LIMIT -> max(rows) - LIMIT",
        "11: max -> min",
    ]


def test_a_fault_changes_one_line(mutants: ModuleType) -> None:
    plain, _ = mutants.planted("def a():\n    return b == c\n", 0)
    assert plain == "def a():\n    return b != c"
