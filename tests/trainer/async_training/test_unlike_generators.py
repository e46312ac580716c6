"""Generators of one run that differ in engine, precision and number of processes."""

from __future__ import annotations

from pathlib import Path

from tests.integration.runs import FEW_ROWS, POLICY_ALONE, calls, lines
from tests.trainer.async_training.test_run import TWO_STEPS, ledger_of, run_async
from tests.trainer.async_training.uids import uids_in_order, uids_of

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
