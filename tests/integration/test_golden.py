"""Five seeded steps give the numbers that were written down; `golden.py` says how to write them
anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.golden import FILE, curve


def test_five_steps_follow_the_golden_curve(tiny_dir: Path, tmp_path: Path) -> None:
    expected = json.loads(FILE.read_text(encoding="utf-8"))
    found = curve(tiny_dir, tmp_path)
    assert len(found) == len(expected) == 5
    for step, (ours, golden) in enumerate(zip(found, expected, strict=True), 1):
        assert ours == pytest.approx(golden, rel=1e-4, abs=1e-6), f"step {step}"
