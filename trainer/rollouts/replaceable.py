"""The roles of a PPO run that can be replaced when their process is lost."""

from __future__ import annotations

from typing import Any

from trainer.groups.worker_groups import WorkerGroups
from trainer.recovery import ReplaceableRoles
from trainer.replicas import Replicas
from workers.parallel.sharding import replicas, settle
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.roles.reference import ReferenceWorker
from workers.roles.reward_model import RewardModelWorker
from workers.roles.rollout import RolloutWorker
from workers.roles.sampler import SamplerWorker
from workers.roles.teacher import TeacherWorker

FROZEN = (ReferenceWorker, RewardModelWorker, SamplerWorker, TeacherWorker)
"""Their weights are in a model folder."""
EASILY_ENDED = ("native", "hf")
"""Rollout engines that leave nothing behind when they are dropped."""


def replaceable_roles(config: Any, groups: WorkerGroups) -> ReplaceableRoles:
    """Rollouts, and what reads with weights that do not move; a class of the user's own is not."""
    found, with_processes, generating = set(), set(), set()
    for role in groups:
        cls = groups[role].roles[role]
        if cls in (RolloutWorker, *FROZEN):
            found.add(role)
        if issubclass(cls, RolloutWorker):
            generating.add(role)
            if config.actor_rollout_ref.rollout.name not in EASILY_ENDED:
                with_processes.add(role)
    if "ref" in found and config.actor_rollout_ref.ref.update_every is not None:
        found.remove("ref")  # it follows the actor from afar, and no other has its weights
    return ReplaceableRoles(
        frozenset(found),
        frozenset(with_processes),
        _replicas(config, groups),
        frozenset(generating),
    )


def _replicas(config: Any, groups: WorkerGroups) -> Replicas:
    """Of actor and critic, where a rank that is lost leaves their whole state on others."""
    sections: dict[type, Any] = {}
    if "actor" in groups:
        actor = config.actor_rollout_ref.actor
        sections[ActorWorker] = actor.strategy, actor.fsdp_config
    if "critic" in groups:
        sections[CriticWorker] = config.critic.strategy, config.critic.model.fsdp_config
    found = {}
    for role in groups:
        cls = groups[role].roles[role]
        if cls in sections:
            several = replicas(groups[role].world_size, settle(*sections[cls]))
            if len(several) > 1:
                found[role] = several
    return found
