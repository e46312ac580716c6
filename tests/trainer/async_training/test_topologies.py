"""Asynchronous runs of every shape train on the same samples and reach the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import calls, numbers, overrides
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


@pytest.fixture(scope="module")
def one_by_one(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one generator and one trainer."""
    folder = tmp_path_factory.mktemp("1m1t")
    run(load_config(overrides(tiny_dir, folder, *SETTINGS), ASYNC))
    return folder


@pytest.mark.parametrize(("topology", "generators", "trainers"), [("1m2t", 1, 2), ("2m2t", 2, 2)])
def test_shards_of_the_weights_and_more_generators_change_no_curve(
    tiny_dir: Path, tmp_path: Path, one_by_one: Path, topology: str, generators: int, trainers: int
) -> None:
    settings = (*SETTINGS, f"async_training.topology={topology}", OTHER_WEIGHTS)
    hashes = Hashes()
    run(load_config(overrides(tiny_dir, tmp_path, *settings), ASYNC), callbacks=[hashes])
    assert hashes.generators == hashes.trainers
    assert [len(each) for each in hashes.trainers] == [1, 1]
    assert len(set.union(*hashes.trainers)) == 2
    assert len({c["args"]["pid"] for c in calls(tmp_path, "submit")}) == generators
    assert len({c["args"]["pid"] for c in calls(tmp_path, "update_actor")}) == trainers

    ledger = json.loads((tmp_path / "async.json").read_text())["ledger"]
    assert sum(ledger["trainers"].values()) == 2 * 8 * 2
    assert len(curves(one_by_one)[0]) >= 5
    for ours, theirs in zip(curves(tmp_path), curves(one_by_one), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
