"""`bisect` on 57 planted differences and 23 equal pairs (`pairs.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.tools.bisect.pairs import OURS, PAIRS, TRL, VERL, Pair, Sides, outcome


@pytest.fixture(scope="module")
def sides(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Sides:
    return Sides(tmp_path_factory.mktemp("sides"), tiny_dir)


def check(sides: Sides, pair: Pair) -> None:
    if pair.system != "ours":
        pytest.importorskip(pair.system.split()[0])
    result = outcome(sides, pair)
    assert result.stage == pair.stage, result
    assert result.cause_is_right, result


def test_there_are_57_differences_and_23_equal_pairs() -> None:
    assert [sum(bool(pair.stage) for pair in pairs) for pairs in (OURS, VERL, TRL)] == [28, 16, 13]
    assert sum(not pair.stage for pair in PAIRS) == 23


@pytest.mark.parametrize("pair", [*OURS[0:13:6], *OURS[28:30], *VERL, *TRL], ids=str)
def test_a_difference_and_its_cause_are_named(sides: Sides, pair: Pair) -> None:
    check(sides, pair)


@pytest.mark.slow
@pytest.mark.parametrize("pair", OURS, ids=str)
def test_every_difference_of_two_runs_is_named(sides: Sides, pair: Pair) -> None:
    check(sides, pair)
