"""The roles of a PPO run that can be replaced when their process is lost."""

from __future__ import annotations

from typing import Any

from trainer.groups.worker_groups import WorkerGroups
from workers.roles.rollout import RolloutWorker


def replaceable_roles(config: Any, groups: WorkerGroups) -> frozenset[str]:
    """Rollouts, and classes that say of themselves that their weights do not move (`is_frozen`).

    A subclass says it again: it may keep more.
    """
    found = set()
    for role in groups:
        cls = groups[role].roles[role]
        if cls is RolloutWorker or vars(cls).get("is_frozen", False):
            found.add(role)
    if "ref" in found and config.actor_rollout_ref.ref.update_every is not None:
        found.discard("ref")  # it follows the actor from afar, and no other has its weights
    return frozenset(found)
