"""Every preset, estimator and policy loss raises the reward of the tiny task in 20 steps.

They are trained by the command line in this process, as in `docs/make_curves.py`; a new algorithm
is included once it is registered.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import load

CURVES = load("docs/make_curves.py")
RUNS = CURVES.runs()


@pytest.mark.slow
@pytest.mark.parametrize("which", RUNS, ids=lambda which: CURVES.id_of(*which))
def test_twenty_steps_raise_the_reward(
    which: tuple[str, str], tiny_dir: Path, tmp_path: Path
) -> None:
    scores = CURVES.train(RUNS[which], tiny_dir, tmp_path)
    first, last = CURVES.first_and_last(scores)
    assert len(scores) == CURVES.NUM_STEPS
    assert last > first + CURVES.LEAST_RISE, scores
