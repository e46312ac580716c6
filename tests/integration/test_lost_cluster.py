"""A run whose cluster is lost starts another one and continues, within the same command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.lost_cluster import LOST_IN, SETTINGS, STEPS
from tests.integration.runs import lines, numbers
from tests.programs import found_by
from tests.trainer.recipes.regression import REGRESSION
from trainer import load_config, run


@pytest.mark.ray
def test_a_run_that_loses_its_cluster_goes_on_in_another_to_the_same_numbers(
    tmp_path: Path, forked_python: Path
) -> None:
    undisturbed = tmp_path / "undisturbed"
    here = ("trainer.backend=local", f"trainer.default_local_dir={undisturbed}")
    run(load_config([*here, *SETTINGS], REGRESSION))

    found = found_by(forked_python, "tests.integration.lost_cluster", tmp_path, limit_s=300)
    gone = {"gcs_server": "the head of the Ray cluster is gone", "raylet": "no Ray daemon answers"}
    for kind, words in gone.items():
        first, *_, last = found[kind]
        assert found[kind] == [first] * LOST_IN + [last] * (STEPS - LOST_IN + 1)
        assert first != last
        lost = tmp_path / kind
        assert numbers(lost) == numbers(undisturbed)
        losses = [line for line in lines(lost, "restarts.jsonl") if "lost" in line]
        assert [line["step"] for line in losses] == [LOST_IN]
        assert words in losses[0]["lost"]
        assert "restarts: 1, in step 3" in (lost / "report.html").read_text(encoding="utf-8")
