"""Ten asynchronous steps on Ray under every fault: the ledger balances, and no process is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import FEW_ROWS, POLICY_ALONE, lines, overrides
from tests.trainer.async_training.test_lost_trainer import of_training
from tests.trainer.async_training.uids import uids_in_order, uids_of
from tests.trainer.process_backends import BACKENDS
from tests.waiting import wait_until_ended
from trainer import load_config, restarts, run
from trainer.async_training.recipe import ASYNC

STEPS, SAMPLES = 10, 8
SHARED = (*FEW_ROWS, *POLICY_ALONE, f"trainer.total_training_steps={STEPS}")
FAULTS = (
    "faults.kill_worker=0.15",
    "faults.drop_weight_bucket=0.2",
    "faults.delay_call=0.2",
    "faults.delay_s=0.05",
    "trainer.save_freq=4",
    "trainer.max_restarts=20",
    "async_training.on_generator_failure=restart",
)


class Pids:
    """A callback that records the worker processes at the start of each step."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def on_step_begin(self, trainer: Any) -> None:
        groups = trainer.groups
        self.seen |= {header.pid for role in groups for header in groups[role].transport.started}


@pytest.mark.ray
@pytest.mark.parametrize(
    ("topology", "staleness", "seed"),
    [("1m1t", 0, 198), pytest.param("2m2t", 1, 565, marks=pytest.mark.slow)],
)
def test_the_ledger_balances_and_no_process_is_left(
    tiny_dir: Path,
    tmp_path: Path,
    topology: str,
    staleness: int,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    ray_session: None,
) -> None:
    monkeypatch.setattr(restarts, "FIRST_WAIT_S", 0.01)
    shape = f"async_training.topology={topology}", f"async_training.max_staleness={staleness}"
    settings = (*SHARED, *FAULTS, *shape, *BACKENDS["ray"], f"faults.seed={seed}")
    pids = Pids()
    run(load_config(overrides(tiny_dir, tmp_path, *settings), ASYNC), callbacks=[pids])

    *faults, steps = lines(tmp_path, "faults.jsonl")
    ledger = json.loads((tmp_path / "async.json").read_text())["ledger"]
    killed = {fault["role"] for fault in faults if fault["kind"] == "kill_worker"}
    assert killed >= {"actor", "rollout"}
    kinds = {fault["kind"] for fault in faults}
    assert kinds == {"kill_worker", "drop_weight_bucket", "delay_call"}
    assert steps["completed"] == STEPS
    assert steps["started"] == STEPS + steps["repeated"]
    assert sum(ledger["trainers"].values()) == STEPS * SAMPLES
    for generator in ledger["generators"].values():
        assert generator["made"] == generator["trained"] + sum(generator["dropped"].values())
    wait_until_ended(*pids.seen)
    if staleness == 0:
        whole = tmp_path / "whole"
        undisturbed = (*SHARED, *shape, *BACKENDS["local"])
        run(load_config(overrides(tiny_dir, whole, *undisturbed), ASYNC))
        assert of_training(tmp_path) == of_training(whole)
        assert uids_of(tmp_path, STEPS) == uids_in_order(tiny_dir, STEPS, *FEW_ROWS)
