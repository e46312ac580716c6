"""The roles of makers: a rollout each, and with `detached.score_on=maker` those that score.

Maker 0 has `ref`, `reward_model`, `critic_copy` beside `rollout`; those of maker 1 are `ref_1` and
so on. All roles of a maker share its pool, and so its processes.
"""

from __future__ import annotations

from trainer.detached.config import DetachedConfig
from trainer.detached.topology import Topology, maker_pool, role_on
from trainer.ppo.recipe import REWARD_MODEL_WORKER, inactive_roles
from trainer.ppo.sizes import CRITIC_COPY
from workers.config import model_rewards

ROLLOUT_WORKER = "workers.roles.rollout.RolloutWorker"
REFERENCE_WORKER = "workers.roles.reference.ReferenceWorker"
CRITIC_COPY_WORKER = "workers.roles.critic_copy.CriticCopyWorker"


def score_roles(config: DetachedConfig) -> dict[str, str]:
    """Roles with which every maker scores, as maker 0 has them -> their classes."""
    if config.detached.score_on == "trainer":
        return {}
    inactive = inactive_roles(config)
    found = {}
    if "ref" not in inactive:
        found["ref"] = REFERENCE_WORKER
    if "critic" not in inactive:
        found[CRITIC_COPY] = CRITIC_COPY_WORKER
    return found | dict.fromkeys(model_rewards(config), REWARD_MODEL_WORKER)


def maker_roles(config: DetachedConfig) -> dict[str, int]:
    """Every role of every maker -> the maker's number."""
    roles = "rollout", *score_roles(config)
    makers = range(config.detached.makers)
    return {role_on(role, maker): maker for maker in makers for role in roles}


def place_makers(config: DetachedConfig, topology: Topology) -> dict[str, str]:
    """Role -> pool, of all makers; writes the classes of roles that are not built in."""
    classes = {"rollout": ROLLOUT_WORKER, **score_roles(config)}
    pools = {}
    for maker in range(topology.makers):
        for role in classes:
            own = role_on(role, maker)
            pools[own] = maker_pool(maker)
            if maker or role == CRITIC_COPY:
                cls = config.role_workers.get(role) or classes[role]
                config.role_workers.setdefault(own, cls)
    return pools
