"""Five seeded steps give the numbers in the golden file; `golden.py` rewrites it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.golden import FILE, curve


@pytest.fixture(scope="module")
def five_steps(
    tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[dict[str, float]], Path]:
    """The numbers of the run, and its folder."""
    folder = tmp_path_factory.mktemp("golden")
    return curve(tiny_dir, folder), folder


def test_five_steps_equal_the_golden_curve(
    five_steps: tuple[list[dict[str, float]], Path],
) -> None:
    expected = json.loads(FILE.read_text(encoding="utf-8"))
    steps, _ = five_steps
    assert len(steps) == len(expected) == 5
    for step, (metrics, golden) in enumerate(zip(steps, expected, strict=True), 1):
        assert metrics == pytest.approx(golden, rel=1e-4, abs=1e-6), f"step {step}"


def test_a_step_adds_at_most_10_kb_to_its_run_folder(
    five_steps: tuple[list[dict[str, float]], Path],
) -> None:
    _, folder = five_steps
    grows = [folder / "metrics.jsonl", folder / "timeline.json", *folder.glob("rollouts/*")]
    assert len(grows) == 7
    assert sum(path.stat().st_size for path in grows) / 5 < 10_000
