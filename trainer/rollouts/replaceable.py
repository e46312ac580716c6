"""The roles of a PPO run that can be replaced when their process is lost."""

from __future__ import annotations

from typing import Any

from trainer.groups.worker_groups import WorkerGroups
from workers.roles.reference import ReferenceWorker
from workers.roles.reward_model import RewardModelWorker
from workers.roles.rollout import RolloutWorker
from workers.roles.sampler import SamplerWorker
from workers.roles.teacher import TeacherWorker

STATELESS = (RolloutWorker, SamplerWorker, ReferenceWorker, RewardModelWorker, TeacherWorker)
"""Their weights are in a model folder, or another role's; subclasses may keep more."""


def replaceable_roles(config: Any, groups: WorkerGroups) -> frozenset[str]:
    """Rollouts, and what reads with weights that do not move; a class of the user's own is not."""
    found = {role for role in groups if groups[role].roles[role] in STATELESS}
    if "ref" in found and config.actor_rollout_ref.ref.update_every is not None:
        found.discard("ref")  # it follows the actor from afar, and no other has its weights
    return frozenset(found)
