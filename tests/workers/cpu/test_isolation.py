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

from tests import ROOT
from tests.forked import run_program
from tests.workers.gradients import ACTOR_COLUMNS, gradients
from tests.workers.samples import make_batch, started, tiny_config


def print_changes() -> None:
    """Print, in the fork, what importing every module and running engines change."""
    from tests import foreign_functions as foreign

    importlib.import_module("ray")  # which sets a variable
    environment = dict(os.environ)
    for package in foreign.OURS:
        import_all(package)
    assert "workers.cpu.onednn" in sys.modules
    changes = {
        "loaded before the first snapshot": foreign.EARLY,
        "CPU kernels loaded by engines on other devices": foreign.KERNELS,
        "linear layer on another device": foreign.LINEAR_ON_META,
        "functions changed by imports": foreign.changed(foreign.BEFORE),
        "variables changed by imports": foreign.ENVIRONMENT
        + foreign.changed_variables(environment),
        **changed_by_engines(Path(sys.argv[1])),
    }
    print(json.dumps(changes))


def import_all(package: str) -> None:
    folders = importlib.import_module(package).__path__
    for module in pkgutil.walk_packages(folders, f"{package}."):
        if not module.name.endswith(("__main__", "main_ppo")):
            importlib.import_module(module.name)


def changed_by_engines(tiny_dir: Path) -> dict[str, Any]:
    """Return the changes while an engine runs, and after training and sampling."""
    from transformers.models.llama import modeling_llama

    from tests import foreign_functions as foreign
    from workers.cpu import onednn
    from workers.roles.actor import ActorWorker
    from workers.rollout.base import EngineLimits, SamplingParams
    from workers.rollout.native.engine import NativeRolloutEngine
    from workers.rollout.sample import Sample
    from workers.training.microbatch import MicroBatchBudget

    onednn.MIN_MULTIPLICATIONS = 1
    before, vars_before = foreign.snapshot(), dict(vars(modeling_llama))
    actor = started(ActorWorker, tiny_config(tiny_dir), 1)
    with actor.engine.running():
        while_running = foreign.changed(before), vars(modeling_llama) == vars_before
    gradients(actor, make_batch(4), ACTOR_COLUMNS, MicroBatchBudget(rows=2))
    engine = NativeRolloutEngine(actor.engine.module, EngineLimits(8, 4), owns_weights=False)
    engine.commit(0)
    engine.generate([Sample([1, 2, 3])], SamplingParams(max_tokens=4, stop_token_ids=(0,)))
    return {
        "changes and unchanged model module while an engine runs": while_running,
        "changes and unchanged model module after engines ran": [
            foreign.changed(before),
            vars(modeling_llama) == vars_before,
        ],
    }


def test_imports_and_engines_change_no_other_package(tiny_dir: Path) -> None:
    done = run_program(print_changes, str(tiny_dir), folder=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "loaded before the first snapshot": [],
        "CPU kernels loaded by engines on other devices": [],
        "linear layer on another device": "TorchLinear",
        "functions changed by imports": [],
        "variables changed by imports": [],
        "changes and unchanged model module while an engine runs": [[], True],
        "changes and unchanged model module after engines ran": [[], True],
    }
