"""Models, sharding and rollout engines, and the roles that stand on them; the order of calls is the trainer's.

Names are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.actor import ActorWorker
    from workers.config import WorkersConfig
    from workers.critic import CriticWorker
    from workers.reference import ReferenceWorker
    from workers.reward import RewardModelWorker
    from workers.rollout import RolloutWorker

_HOME = {
    "ActorWorker": "actor",
    "CriticWorker": "critic",
    "ReferenceWorker": "reference",
    "RewardModelWorker": "reward",
    "RolloutWorker": "rollout",
    "WorkersConfig": "config",
}
__all__ = ["ActorWorker", "CriticWorker", "ReferenceWorker", "RewardModelWorker", "RolloutWorker", "WorkersConfig"]


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'workers' has no attribute '{name}'")
    return getattr(importlib.import_module(f"workers.{_HOME[name]}"), name)
