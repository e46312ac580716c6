"""With routes that cross, each trainer rank gets the samples of its own generators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import POLICY_ALONE, lines, overrides
from tests.trainer.async_training.test_run import LOCAL, ledger_of
from trainer import load_config, run
from trainer.async_training import weights
from trainer.async_training.recipe import ASYNC

EDGES = {(0, 1), (1, 0), (2, 1)}
"""(generator, trainer rank)"""
WEIGHT_EDGES = {(0, "rollout"), (0, "rollout_2"), (1, "rollout_1")}
"""(trainer rank, role of a generator)"""
CROSSED = (
    "async_training.topology=3m2t",
    "async_training.sample_routes=[[0,1],[1,0],[2,1]]",
    "async_training.weight_routes=[[0,0],[1,1],[0,2]]",
    "async_training.prompts_per_call=2",
    "role_workers.rollout=tests.trainer.async_training.rigged_workers.NotingRollout",
    "role_workers.actor=tests.trainer.async_training.rigged_workers.NotingActor",
)


class HashesAtTheEnd:
    """A callback that stores the hashes of the trainers' weights after the last update."""

    def on_train_end(self, trainer: Any) -> None:
        self.seen: list[str] = trainer.groups["actor"].weights_checksum(True)


def uids_of_rank(folder: Path, role: str, rank: int) -> set[str]:
    """Return all uids that this rank generated or learned from."""
    return {uid for call in lines(folder, f"uids_of_{role}_{rank}.jsonl") for uid in call}


def test_samples_and_weights_follow_the_routes_and_trainers_stay_equal(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sends: set[tuple[int, str]] = set()
    deliver = weights.deliver_weights

    def note(actor: Any, rollout: Any, *, sender: int, **more: Any) -> dict[str, float]:
        sends.add((sender, rollout.name))
        return deliver(actor, rollout, sender=sender, **more)

    monkeypatch.setattr(weights, "deliver_weights", note)
    hashes = HashesAtTheEnd()
    config = load_config(overrides(tiny_dir, tmp_path, LOCAL, *CROSSED, *POLICY_ALONE), ASYNC)
    run(config, callbacks=[hashes])

    generated = [uids_of_rank(tmp_path, role, 0) for role in config.topology.roles()]
    learned = [uids_of_rank(tmp_path, "actor", rank) for rank in (0, 1)]
    assert {(g, t) for g in (0, 1, 2) for t in (0, 1) if generated[g] & learned[t]} == EDGES
    assert [len(uids) for uids in learned] == [3 * 4, 3 * 4]
    assert ledger_of(tmp_path)["trainers"] == {"0": 3 * 8, "1": 3 * 8}
    assert sends == WEIGHT_EDGES
    assert len(hashes.seen) == 2
    assert len(set(hashes.seen)) == 1
