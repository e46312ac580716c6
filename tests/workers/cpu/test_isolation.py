"""The CPU kernels change nothing of other packages, nor of the process, and only a CPU loads them.

They are looked at in a process of their own: this one has imported everything already.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

SNAPSHOT = """
import gc, os, sys, types
gc.disable()
import ray, tensordict, torch, torch.distributed.fsdp, torch.distributed.checkpoint, transformers
from transformers import AutoModelForCausalLM, GenerationMixin
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2

KINDS = (types.FunctionType, types.BuiltinFunctionType, type)

def snapshot():
    "(module, name) and (module, class, name) -> the function or class that stands there."
    seen = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in ("torch", "transformers"):
            continue
        for name, value in list(vars(module).items()):
            if isinstance(value, KINDS):
                seen[module_name, name] = value
            if isinstance(value, type) and value.__module__ == module_name:
                seen |= {(module_name, name, key): own for key, own in vars(value).items()
                         if isinstance(own, KINDS)}
    return seen

def changed(before):
    after = snapshot()
    return sorted(str(key) for key, value in before.items() if after.get(key) is not value)
"""

IMPORTS = """
import importlib, pkgutil
before, environment = snapshot(), dict(os.environ)
import workers.roles.actor, workers.roles.critic, workers.roles.rollout
import workers.rollout.native.engine, workers.training.engine
from torch import nn
from workers.rollout.native.linear import TorchLinear, build_linear
assert type(build_linear(nn.Linear(2, 2, device="meta"))) is TorchLinear
print("kernels", [name for name in sys.modules if name.startswith("workers.cpu")])

for package in ("verl_like", "workers", "trainer"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if not module.name.endswith(("__main__", "main_ppo")):
            importlib.import_module(module.name)
assert "workers.cpu.fused_ops" in sys.modules
print("imports", changed(before), dict(os.environ) == environment)
"""

RUN_AN_ENGINE = """
sys.path.insert(0, "tests/workers")
from tests.workers.gradients import ACTOR_COLUMNS, gradients
from tests.workers.samples import make_batch, started, tiny_config
from workers.cpu import fused_ops, onednn
from workers.roles.actor import ActorWorker
from workers.rollout.base import EngineLimits, Request, SamplingParams
from workers.rollout.native.engine import NativeEngine
from workers.training.microbatch import Budget

fused_ops.MIN_MULTIPLICATIONS = 1
rotations = []
original = fused_ops._rotary_in_place_of
fused_ops._rotary_in_place_of = lambda own: rotations.append(own) or original(own)
rotary, vars_before = modeling_llama.apply_rotary_pos_emb, dict(vars(modeling_llama))
before = snapshot()
actor = started(ActorWorker, tiny_config(sys.argv[1]), 1)
with actor.engine.running():
    inside = changed(before), vars(modeling_llama) == vars_before
gradients(actor, make_batch(4), ACTOR_COLUMNS, Budget(rows=2))
engine = NativeEngine(actor.engine.module, EngineLimits(8, 4), owns_weights=False)
engine.commit(0)
engine.generate([Request([1, 2, 3])], SamplingParams(max_tokens=4, stop_token_ids=(0,)))
assert rotations
print("engine", inside, changed(before), vars(modeling_llama) == vars_before)
"""


@pytest.fixture(scope="module")
def seen(tiny_dir: Path) -> dict[str, str]:
    """What a process prints that imports the engines, then all, then runs an engine."""
    program = SNAPSHOT + IMPORTS + RUN_AN_ENGINE
    command = [sys.executable, "-c", program, str(tiny_dir)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = ("kernels", "imports", "engine")
    found = [line.partition(" ") for line in done.stdout.splitlines()]
    return {word: said for word, _, said in found if word in words}


def test_engines_and_roles_import_the_cpu_kernels_only_when_they_run_on_one(
    seen: dict[str, str],
) -> None:
    assert seen["kernels"] == "[]"


def test_importing_every_module_changes_no_other_package_and_no_environment_variable(
    seen: dict[str, str],
) -> None:
    assert seen["imports"] == "[] True"


def test_an_engine_that_trains_and_generates_changes_no_other_package(
    seen: dict[str, str],
) -> None:
    assert seen["engine"] == "([], True) [] True"
