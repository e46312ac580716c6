"""A run whose cluster is lost starts another one and continues, within the same command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.lost_cluster import LOST_IN, SETTINGS
from tests.integration.runs import lines, numbers
from tests.programs import found_by
from tests.trainer.recipes.regression import REGRESSION
from trainer import load_config, run


@pytest.mark.long
@pytest.mark.ray
def test_a_run_that_loses_its_cluster_continues_in_another_with_the_same_numbers(
    tmp_path: Path, forked_python: Path
) -> None:
    undisturbed = tmp_path / "undisturbed"
    here = ("trainer.backend=local", f"trainer.default_local_dir={undisturbed}")
    run(load_config([*here, *SETTINGS], REGRESSION))

    lost = tmp_path / "lost"
    heads = found_by(forked_python, "tests.integration.lost_cluster", lost, limit_s=300)["heads"]
    first, second, third = dict.fromkeys(heads)
    assert heads == [first] * 3 + [second] * 2 + [third]
    assert numbers(lost) == numbers(undisturbed)
    losses = [line for line in lines(lost, "restarts.jsonl") if "lost" in line]
    assert [line["step"] for line in losses] == list(LOST_IN.values())
    assert "the head of the Ray cluster is gone" in losses[0]["lost"]
    assert "no Ray daemon answers" in losses[1]["lost"]
    assert "restarts: 2, in step 3, 4" in (lost / "report.html").read_text(encoding="utf-8")
