"""Models, sharding, rollout engines, and the roles that use them, in worker processes.

`trainer` defines the order of the calls. Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.config import WorkersConfig
    from workers.roles.actor import ActorWorker
    from workers.roles.critic import CriticWorker
    from workers.roles.reference import ReferenceWorker
    from workers.roles.reward_model import RewardModelWorker
    from workers.roles.rollout import RolloutWorker

_MODULES = {
    "ActorWorker": "roles.actor",
    "CriticWorker": "roles.critic",
    "ReferenceWorker": "roles.reference",
    "RewardModelWorker": "roles.reward_model",
    "RolloutWorker": "roles.rollout",
    "WorkersConfig": "config",
}
__all__ = [
    "ActorWorker",
    "CriticWorker",
    "ReferenceWorker",
    "RewardModelWorker",
    "RolloutWorker",
    "WorkersConfig",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'workers' has no attribute '{name}'")
    return getattr(importlib.import_module(f"workers.{_MODULES[name]}"), name)
