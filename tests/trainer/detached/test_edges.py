"""A run with edges that cross: each trainer rank has the samples and the makers that they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import POLICY_ALONE, lines, overrides
from tests.trainer.detached.test_run import LOCAL, ledger_of
from trainer import load_config, run
from trainer.detached import weights
from trainer.detached.recipe import DETACHED

EDGES = {(0, 1), (1, 0), (2, 1)}
"""(maker, trainer rank)"""
WEIGHT_EDGES = {(0, "rollout"), (0, "rollout_2"), (1, "rollout_1")}
"""(trainer rank, role of a maker)"""
CROSSED = (
    "detached.topology=3m2t",
    "detached.edges=[[0,1],[1,0],[2,1]]",
    "detached.weight_edges=[[0,0],[1,1],[0,2]]",
    "detached.prompts_per_piece=2",
    "role_workers.rollout=tests.trainer.detached.rigged_workers.NotingRollout",
    "role_workers.actor=tests.trainer.detached.rigged_workers.NotingActor",
)


class HashesAtTheEnd:
    """A callback: what the trainers hold after the last update."""

    def on_train_end(self, trainer: Any) -> None:
        self.seen: list[str] = trainer.groups["actor"].weights_checksum(True)


def uids_given(folder: Path, role: str, rank: int) -> set[str]:
    """All that this rank was asked for or learned from."""
    return {uid for call in lines(folder, f"uids_of_{role}_{rank}.jsonl") for uid in call}


def test_samples_and_weights_go_along_the_edges_and_the_trainers_stay_equal(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sends: set[tuple[int, str]] = set()
    deliver = weights.deliver_weights

    def note(actor: Any, rollout: Any, *, sender: int, **more: Any) -> dict[str, float]:
        sends.add((sender, rollout.name))
        return deliver(actor, rollout, sender=sender, **more)

    monkeypatch.setattr(weights, "deliver_weights", note)
    hashes = HashesAtTheEnd()
    config = load_config(overrides(tiny_dir, tmp_path, LOCAL, *CROSSED, *POLICY_ALONE), DETACHED)
    run(config, callbacks=[hashes])

    made = {
        maker: uids_given(tmp_path, role, 0) for maker, role in enumerate(config.topology.roles())
    }
    learned = [uids_given(tmp_path, "actor", rank) for rank in (0, 1)]
    assert {(m, t) for m in made for t in (0, 1) if made[m] & learned[t]} == EDGES
    assert [len(uids) for uids in learned] == [3 * 4, 3 * 4]
    assert ledger_of(tmp_path)["trainers"] == {"0": 3 * 8, "1": 3 * 8}
    assert sends == WEIGHT_EDGES
    assert len(hashes.seen) == 2
    assert len(set(hashes.seen)) == 1
