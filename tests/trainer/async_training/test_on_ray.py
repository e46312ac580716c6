"""Asynchronous runs on a Ray cluster have the numbers of one machine, also under every fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import FEW_ROWS, POLICY_ALONE, calls, lines, overrides
from tests.trainer.async_training.test_lost_processes import of_training
from tests.trainer.async_training.test_run import ledger_of
from tests.trainer.async_training.test_topologies import curves
from tests.trainer.async_training.uids import uids_in_order, uids_of
from tests.trainer.disturbances import LOSSY, Disturb
from tests.trainer.process_backends import BACKENDS
from tests.waiting import wait_until_ended
from trainer import load_config, recovery, run
from trainer.async_training.recipe import ASYNC

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]
OF_GENERATORS = {"__init__", "init_model", "location", "receive_weights", "submit", "collect"}


def methods_by_process(folder: Path) -> dict[int, set[tuple[str, str]]]:
    """Return process -> the (role, method) pairs that ran in it."""
    methods: dict[int, set[tuple[str, str]]] = {}
    for event in calls(folder):
        methods.setdefault(event["args"]["pid"], set()).add((event["cat"], event["name"]))
    return methods


@pytest.mark.long
def test_processes_on_ray_that_shard_a_model_have_the_numbers_of_ppo(
    tiny_dir: Path, tmp_path: Path, plain: Path
) -> None:
    sections = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
    settings = (
        *BACKENDS["ray"],
        "async_training.topology=2m2t",
        "async_training.max_staleness=0",
        "trainer.total_training_steps=2",
        *(f"{section}.parallel.tp=2" for section in sections),
    )
    run(load_config(overrides(tiny_dir, tmp_path / "ray", *settings), ASYNC))

    for ours, theirs in zip(curves(tmp_path / "ray"), curves(plain)[:2], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    processes = methods_by_process(tmp_path / "ray").values()
    generators = [methods for methods in processes if ("actor", "update_actor") not in methods]
    assert (len(processes), len(generators)) == (4, 2)
    expected = [{(role, method) for method in OF_GENERATORS} for role in ("rollout", "rollout_1")]
    assert sorted(generators, key=len) in (expected, expected[::-1])


STEPS, SAMPLES = 10, 8
SHARED = (*FEW_ROWS, *POLICY_ALONE, f"trainer.total_training_steps={STEPS}")
DISTURBANCES = {
    **{2: ("kill", "rollout"), 3: ("lose", "actor"), 5: ("delay", "rollout")},
    **{6: ("kill", "actor"), 8: ("lose", "actor"), 9: ("delay", "actor")},
}
SETTINGS = (
    LOSSY,
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("topology", "staleness"),
    [("1m1t", 0), pytest.param("2m2t", 1, marks=pytest.mark.slow)],
)
def test_the_ledger_balances_and_no_process_is_left(
    tiny_dir: Path,
    tmp_path: Path,
    topology: str,
    staleness: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "FIRST_WAIT_S", 0.01)
    shape = f"async_training.topology={topology}", f"async_training.max_staleness={staleness}"
    settings = (*SHARED, *SETTINGS, *shape, *BACKENDS["ray"])
    pids, disturb = Pids(), Disturb(DISTURBANCES)
    run(load_config(overrides(tiny_dir, tmp_path, *settings), ASYNC), callbacks=[pids, disturb])

    ledger = ledger_of(tmp_path)
    assert not disturb.left
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, STEPS + 1))
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
