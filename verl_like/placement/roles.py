"""Role names, their aliases, and the mapping from roles to pools.

    {"actor_rollout": "main", "critic": "critic_pool"}     # role -> pool

A role is any string. An alias such as `actor_rollout` names several roles in one process. If the
mapping also has `rollout`, that entry decides the pool of the rollout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from verl_like.errors import PlacementError, nearest


class Role:
    """The usual role names, for users of verl; any other string is a role as well."""

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "reward_model"
    ActorRolloutRef = "actor_rollout_ref"
    Env = "env"


ALIASES: dict[str, tuple[str, ...]] = {
    Role.ActorRollout: (Role.Actor, Role.Rollout),
    Role.ActorRolloutRef: (Role.Actor, Role.Rollout, Role.RefPolicy),
}


def expand_roles(role_mapping: Mapping[str, str]) -> dict[str, str]:
    """Return the mapping with its aliases expanded; of a role's entries, the narrowest one wins.

    The role's own name is the narrowest, then `actor_rollout`, then `actor_rollout_ref`.
    """
    expanded: dict[str, str] = {}
    widths: dict[str, int] = {}
    for name, pool in role_mapping.items():
        roles = roles_named(name)
        for role in roles:
            if len(roles) <= widths.get(role, len(roles)):
                expanded[role], widths[role] = pool, len(roles)
    return expanded


def roles_named(name: str) -> tuple[str, ...]:
    """Return the roles that a name in the mapping stands for; an alias stands for several."""
    return ALIASES.get(name, (name,))


def roles_by_pool(pools: Iterable[str], role_mapping: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the roles of every pool; raise if a pool does not exist or has no role."""
    roles: dict[str, list[str]] = {pool: [] for pool in pools}
    for role, pool in expand_roles(role_mapping).items():
        if pool not in roles:
            known = f" Pools: {', '.join(roles)}." if roles else ""
            raise PlacementError(
                f"role '{role}' is mapped to pool '{pool}', which does not "
                f"exist.{nearest(pool, roles)}{known} Add this pool with "
                f"resource_pool_spec.{pool}=[1], a list of its processes on each node."
            )
        roles[pool].append(role)

    for pool, its_roles in roles.items():
        if not its_roles:
            raise PlacementError(
                f"pool '{pool}' has no role.{nearest(pool, set(roles) - {pool})} Map a role to it, "
                f"or drop the pool (~resource_pool_spec.{pool})."
            )
    return roles
