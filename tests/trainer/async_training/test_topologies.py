"""A run of two generators and two trainers trains on the same samples, with the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import calls, numbers, overrides
from tests.trainer.async_training.test_run import ledger_of
from trainer import load_config, run
from trainer.async_training.recipe import ASYNC

SETTINGS = (
    "trainer.backend=local",
    "async_training.max_staleness=0",
    "trainer.total_training_steps=2",
)
OTHER_WEIGHTS = "role_workers.rollout=tests.trainer.async_training.rigged_workers.OtherWeights"


def curves(folder: Path) -> list[dict[str, float]]:
    """Return the scores and losses, step by step."""
    names = ("critic/score/", "actor/pg_loss", "actor/grad_norm", "critic/vf_loss")
    return [
        {n: value for n, value in line.items() if n.startswith(names)} for line in numbers(folder)
    ]


class Hashes:
    """A callback that stores the hashes of all trainer ranks and generators, at every version."""

    def __init__(self) -> None:
        self.trainers: list[set[str]] = []
        self.generators: list[set[str]] = []

    def on_sample_end(self, trainer: Any, batch: Any) -> None:
        groups = trainer.groups
        self.trainers.append(set(groups["actor"].weights_checksum(True)))
        generators = [role for role in groups if role.startswith("rollout")]
        self.generators.append(
            {sum for role in generators for sum in groups[role].weights_checksum()}
        )


def test_two_generators_and_trainers_change_no_curve(
    tiny_dir: Path, tmp_path: Path, plain: Path
) -> None:
    settings = (*SETTINGS, "async_training.topology=2m2t", OTHER_WEIGHTS)
    hashes = Hashes()
    run(load_config(overrides(tiny_dir, tmp_path, *settings), ASYNC), callbacks=[hashes])
    assert hashes.generators == hashes.trainers
    assert [len(hashes_of_step) for hashes_of_step in hashes.trainers] == [1, 1]
    assert len(set.union(*hashes.trainers)) == 2
    assert len({c["args"]["pid"] for c in calls(tmp_path, "submit")}) == 2
    assert len({c["args"]["pid"] for c in calls(tmp_path, "update_actor")}) == 2

    assert sum(ledger_of(tmp_path)["trainers"].values()) == 2 * 8 * 2
    assert len(curves(plain)[0]) >= 5
    for ours, theirs in zip(curves(tmp_path), curves(plain)[:2], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
