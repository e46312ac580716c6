"""Loaded by the server of forked processes (`PRELOADED` in `tests/conftest.py`) before any of our
packages: the functions and classes of torch and transformers as they are without us.

Then it loads our packages, and records which CPU kernels the roles and engines load. `changed`
returns what our packages changed; `tests/workers/cpu/test_isolation.py` calls it in a fork.
"""

from __future__ import annotations

import importlib
import os
import sys
import types

from torch import nn

OTHERS = (
    "tensordict",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
)
OURS = ("verl_like", "workers", "trainer")
ROLES = (
    "workers.roles.actor",
    "workers.roles.critic",
    "workers.roles.rollout",
    "workers.rollout.native.engine",
    "workers.training.engine",
)
OTHER_MODULES = (
    "trainer.launch",
    "trainer.ppo.stages",
    "verl_like.backends.rpc",
    "workers.roles.reference",
    "workers.roles.reward_model",
    "workers.roles.reference",
)
"""Our other modules that test processes need."""
KINDS = (types.FunctionType, types.BuiltinFunctionType, type)
Place = tuple[str, ...]


def snapshot() -> dict[Place, object]:
    """Return (module, name) and (module, class, name) -> the function or class there."""
    seen: dict[Place, object] = {}
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] not in ("torch", "transformers"):
            continue
        for name, value in list(vars(module).items()):
            kind = type(value)  # not by isinstance: of deprecated names that is a warning
            if issubclass(kind, KINDS):
                seen[module_name, name] = value
            if issubclass(kind, type) and value.__module__ == module_name:
                for key, member in vars(value).items():
                    if isinstance(member, KINDS):
                        seen[module_name, name, key] = member
    return seen


def changed(before: dict[Place, object]) -> list[str]:
    """Return the places that now hold another function or class."""
    after = snapshot()
    return sorted(str(place) for place, value in before.items() if after.get(place) is not value)


def loaded(*packages: str) -> list[str]:
    """Return the loaded modules of these packages."""
    inside = tuple(f"{package}." for package in packages)
    return [name for name in sys.modules if f"{name}.".startswith(inside)]


def changed_variables(before: dict[str, str]) -> list[str]:
    """Return the environment variables that changed, appeared or disappeared."""
    return sorted({name for name, _ in before.items() ^ os.environ.items()})


def linear_on_meta() -> str:
    """Return the class of a linear layer where no CPU computes."""
    from workers.rollout.native.direct_forward import NARROW, build_linear, uses_onednn

    head = nn.Linear(NARROW, 2, device="meta")
    module = types.SimpleNamespace(lm_head=head, config=types.SimpleNamespace(hidden_size=NARROW))
    return type(build_linear(head, uses_onednn(module))).__name__


for other in OTHERS:
    importlib.import_module(other)
EARLY = loaded(*OURS)
"""Our modules that were loaded before, and might have changed something."""
BEFORE = snapshot()
_environment = dict(os.environ)
for role in ROLES:
    importlib.import_module(role)
LINEAR_ON_META = linear_on_meta()
KERNELS = loaded("workers.cpu")
for module in OTHER_MODULES:
    importlib.import_module(module)
ENVIRONMENT = changed_variables(_environment)
