"""Asynchronous runs on a Ray cluster: separate processes, and the numbers of one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import calls, overrides
from tests.trainer.async_training.test_topologies import curves
from trainer import load_config, run
from trainer.async_training.recipe import ASYNC

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]
ON_RAY = ("trainer.backend=ray", "cpus_per_process=0.25")
OF_GENERATORS = {"__init__", "init_model", "location", "receive_weights", "submit", "take"}


def methods_by_process(folder: Path) -> dict[int, set[tuple[str, str]]]:
    """Return process -> the (role, method) pairs that ran in it."""
    methods: dict[int, set[tuple[str, str]]] = {}
    for event in calls(folder):
        methods.setdefault(event["args"]["pid"], set()).add((event["cat"], event["name"]))
    return methods


def test_processes_on_ray_that_shard_a_model_have_the_numbers_of_ppo(
    tiny_dir: Path, tmp_path: Path, plain: Path
) -> None:
    settings = ("async_training.max_staleness=0", "trainer.total_training_steps=2")
    sections = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")
    more = ["async_training.topology=2m2t", *(f"{section}.parallel.tp=2" for section in sections)]
    run(load_config(overrides(tiny_dir, tmp_path / "ray", *ON_RAY, *settings, *more), ASYNC))

    for ours, theirs in zip(curves(tmp_path / "ray"), curves(plain)[:2], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)
    processes = methods_by_process(tmp_path / "ray").values()
    generators = [methods for methods in processes if ("actor", "update_actor") not in methods]
    assert (len(processes), len(generators)) == (4, 2)
    expected = [{(role, method) for method in OF_GENERATORS} for role in ("rollout", "rollout_1")]
    assert sorted(generators, key=len) in (expected, expected[::-1])
