"""Generators join and leave an asynchronous run: no sample is lost, and the bounds hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.joining_generators import EVENTS, GENERATORS, SETTINGS, STEPS, SYNCHRONOUS
from tests.integration.runs import lines, overrides
from tests.programs import found_by
from tests.trainer.async_training.test_run import shared_numbers
from trainer import load_config, run
from trainer.async_training.recipe import ASYNC

pytestmark = [pytest.mark.ray, pytest.mark.long]


@pytest.fixture(scope="module")
def joined(
    tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path, forked_python: Path
) -> dict[str, Any]:
    """The output of `joining_generators.py`, in a separate process."""
    folder = tmp_path_factory.mktemp("joined") / "runs"
    script = "tests.integration.joining_generators"
    return {"folder": folder, **found_by(forked_python, script, tiny_dir, folder, limit_s=900)}


def test_ten_joins_and_leaves_cost_only_the_samples_in_progress(joined: dict[str, Any]) -> None:
    seen = joined["seen"]["random"]
    assert len(seen) == EVENTS
    assert {event for _, event, _ in seen} == {"join", "drain", "kill"}
    assert {len(living) for *_, living in seen} == {1, 2, 3}
    metrics = lines(joined["folder"] / "random")
    assert len(metrics) == STEPS
    assert max(line["async/staleness/max"] for line in metrics) <= 1


def test_the_log_accounts_for_every_sample(joined: dict[str, Any]) -> None:
    log = json.loads((joined["folder"] / "random" / "async.json").read_text())["ledger"]
    rows = log["generators"].values()
    assert len(rows) == GENERATORS
    for row in rows:
        dropped = sum(row["dropped"].values())
        assert row["made"] == row["trained"] + row["queued"] + row["in_flight"] + dropped
        assert row["trained"] > 0  # each got weights and prompts
    assert sum(row["trained"] for row in rows) == STEPS * 8 * 2


def test_without_staleness_the_numbers_are_those_of_an_undisturbed_run(
    joined: dict[str, Any], tiny_dir: Path, tmp_path: Path
) -> None:
    assert [event for _, event, _ in joined["seen"]["equal"]] == ["join", "drain", "join"]
    local = [s for s in (*SETTINGS, *SYNCHRONOUS) if "min_generators" not in s]
    run(load_config(overrides(tiny_dir, tmp_path, "trainer.backend=local", *local), ASYNC))
    assert shared_numbers(joined["folder"] / "equal") == shared_numbers(tmp_path)
