"""The CPU kernels change neither other packages nor the process, and only a CPU loads them.

The tests look in a fork of a process that recorded the state before our packages were loaded
(`tests/foreign_functions.py`).
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.forked import run_program
from tests.workers.gradients import ACTOR_COLUMNS, gradients
from tests.workers.samples import make_batch, started, tiny_config


def print_what_changes() -> None:
    """Print, in the fork, the changes by importing every module, and by running engines."""
    from tests import foreign_functions as foreign

    importlib.import_module("ray")  # which sets a variable
    environment = dict(os.environ)
    for package in foreign.OURS:
        import_all(package)
    assert "workers.cpu.linear" in sys.modules
    seen = {
        "early": foreign.EARLY,
        "kernels": [foreign.KERNELS, foreign.LINEAR_ON_META],
        "imports": [
            foreign.changed(foreign.BEFORE),
            foreign.ENVIRONMENT + foreign.changed_variables(environment),
        ],
        "engine": changed_by_engines(Path(sys.argv[1])),
    }
    print(json.dumps(seen))


def import_all(package: str) -> None:
    folders = importlib.import_module(package).__path__
    for module in pkgutil.walk_packages(folders, f"{package}."):
        if not module.name.endswith(("__main__", "main_ppo")):
            importlib.import_module(module.name)


def changed_by_engines(tiny_dir: Path) -> list[Any]:
    """Return the changes while an engine runs, and after training and sampling.

    Each comes with whether the module of the model's class is unchanged.
    """
    from transformers.models.llama import modeling_llama

    from tests import foreign_functions as foreign
    from workers.cpu import linear
    from workers.roles.actor import ActorWorker
    from workers.rollout.base import EngineLimits, SamplingParams
    from workers.rollout.native.engine import NativeEngine
    from workers.rollout.sample import Sample
    from workers.training.microbatch import MicroBatchBudget

    linear.MIN_MULTIPLICATIONS = 1
    before, vars_before = foreign.snapshot(), dict(vars(modeling_llama))
    actor = started(ActorWorker, tiny_config(tiny_dir), 1)
    with actor.engine.running():
        inside = [foreign.changed(before), vars(modeling_llama) == vars_before]
    gradients(actor, make_batch(4), ACTOR_COLUMNS, MicroBatchBudget(rows=2))
    engine = NativeEngine(actor.engine.module, EngineLimits(8, 4), owns_weights=False)
    engine.commit(0)
    engine.generate([Sample([1, 2, 3])], SamplingParams(max_tokens=4, stop_token_ids=(0,)))
    return [inside, [foreign.changed(before), vars(modeling_llama) == vars_before]]


@pytest.fixture(scope="module")
def seen(tiny_dir: Path) -> dict[str, Any]:
    """The output of a process that has imported the engines, imports all, and runs some."""
    done = run_program(print_what_changes, str(tiny_dir), folder=ROOT)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_what_was_there_before_was_noted_before_anything_of_ours(seen: dict[str, Any]) -> None:
    assert seen["early"] == []


def test_engines_and_roles_import_the_cpu_kernels_only_when_they_run_on_one(
    seen: dict[str, Any],
) -> None:
    assert seen["kernels"] == [[], "TorchLinear"]


def test_importing_every_module_changes_no_other_package_and_no_environment_variable(
    seen: dict[str, Any],
) -> None:
    assert seen["imports"] == [[], []]


def test_an_engine_that_trains_and_generates_changes_no_other_package(
    seen: dict[str, Any],
) -> None:
    assert seen["engine"] == [[[], True], [[], True]]
