"""Runs of several trainers, of different generators, or with routes that cross."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import FEW_ROWS, POLICY_ALONE, calls, lines, numbers, overrides
from tests.trainer.async_training.test_run import LOCAL, TWO_STEPS, ledger_of, run_async
from tests.trainer.async_training.uids import uids_in_order, uids_of
from trainer import load_config, run
from trainer.async_training import weights
from trainer.async_training.recipe import ASYNC

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


@pytest.mark.long
def test_two_generators_and_trainers_change_no_curve(
    tiny_dir: Path, tmp_path: Path, plain: Path
) -> None:
    shape = ("async_training.topology=2m2t", "async_training.max_staleness=0")
    settings = (LOCAL, *shape, TWO_STEPS, OTHER_WEIGHTS)
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


DIFFERENT = (
    "async_training.topology=2m1t",
    "async_training.max_staleness=0",
    "resource_pool_spec.generator_0_pool=[2]",
    "async_training.generator_settings.1={name: hf, quantization: int8}",
    "role_workers.rollout=tests.trainer.async_training.rigged_workers.NotingRollout",
)
GAP = "training/rollout_probs_diff_max"


def test_different_generators_share_the_prompts_of_a_run(tiny_dir: Path, tmp_path: Path) -> None:
    folder = run_async(tiny_dir, tmp_path, *DIFFERENT, *POLICY_ALONE, *FEW_ROWS, TWO_STEPS)
    assert uids_of(folder, 2) == uids_in_order(tiny_dir, 2, *FEW_ROWS)
    generations = calls(folder, "submit")
    processes = {(event["cat"], event["args"]["pid"]) for event in generations}
    assert sorted(role for role, _ in processes) == ["rollout", "rollout", "rollout_1"]

    generators = ledger_of(folder)["generators"]
    assert all(row["made"] == row["trained"] > 0 for row in generators.values())
    assert sum(row["trained"] for row in generators.values()) == 2 * 8
    # rounded weights draw tokens with other probabilities than those of the trainer; later chunks
    # may all be of the generator that does not round
    assert 1e-5 < lines(folder)[0][GAP]


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


@pytest.mark.long
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
