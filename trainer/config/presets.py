"""Which roles a run needs and how a preset shares devices out, decided from configuration alone.

`trainer.config.compose` calls `share` (for the presets' `${share:...}`) and `settle`;
`verl_like.placement.pools.Placement` then checks the settled pools against the nodes and prints the
plan.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from trainer.config.schema import PPOConfig
from verl_like.errors import ConfigError, nearest

BUILT_IN_ROLES = ("actor", "rollout", "ref", "critic", "reward_model")
SHORTHANDS = {
    "colocate_all": {"placement": "colocate"},
    "colocate_actor_ref": {"placement": "standalone", "role_mapping.ref": "actor_pool"},
    "colocate_critic_reward": {
        "placement": "standalone",
        "role_mapping.reward_model": "critic_pool",
    },
}
"""OpenRLHF's words for a placement -> the overrides that they stand for."""


def inactive_roles(config: Any) -> dict[str, str]:
    """Built-in roles that this run does not need -> why.

    Takes a `PPOConfig` or the composed tree.
    """
    from trainer.ppo.advantages.estimators import ADVANTAGE_ESTIMATORS

    inactive = {}
    name = config.algorithm.adv_estimator
    estimator = ADVANTAGE_ESTIMATORS.look_up(name)
    if "values" not in inspect.signature(estimator).parameters:
        inactive["critic"] = f"algorithm.adv_estimator={name} takes no values"
    if not (config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss):
        inactive["ref"] = "there is no KL in the reward or the loss"
    if not config.reward_model.enable:
        inactive["reward_model"] = "reward_model.enable=false"
    return inactive


def expand_shorthands(overrides: Sequence[str]) -> list[str]:
    """`overrides` with `colocate_...=true` written out; beside another word on the placement it is
    refused.
    """
    pairs = [(override, *override.partition("=")[::2]) for override in overrides]
    chosen = {key for _, key, value in pairs if key in SHORTHANDS and _is_true(key, value)}
    kept = [override for override, key, _ in pairs if key not in SHORTHANDS]
    meant = {key: value for word in sorted(chosen) for key, value in SHORTHANDS[word].items()}
    if "colocate_all" in chosen:
        meant = SHORTHANDS["colocate_all"]
    rivals = [
        o
        for o in kept
        if o.lstrip("+~").startswith(("placement=", "role_mapping", "resource_pool_spec"))
    ]
    if chosen and rivals:
        raise ConfigError(
            f"{' and '.join(sorted(chosen))} and {' and '.join(rivals)} both say where roles run; "
            "keep one of them. The shorthand stands for "
            f"{' '.join(f'{key}={value}' for key, value in meant.items())}."
        )
    return kept + [f"{key}={value}" for key, value in meant.items()]


def _is_true(word: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ConfigError(f"{word}={value}: true or false.")
    return value.lower() == "true"


def share(pool: str, preset_pools: Iterable[str], config: Any) -> list[int]:
    """Processes per node that a preset gives to `pool`: even shares among its pools in use, the
    rest to the first ones.

    Nodes are shared out when there is at least one for each pool, otherwise the devices of every
    node are.
    """
    inactive = inactive_roles(config)
    needed = {str(p) for role, p in config.role_mapping.items() if role not in inactive}
    pools = [p for p in preset_pools if p in needed]
    if pool not in pools:
        return []
    num_nodes, num_devices = config.trainer.nnodes, config.trainer.n_gpus_per_node
    by_node = num_nodes >= len(pools)
    units = num_nodes if by_node else num_devices
    if units < len(pools):
        raise ConfigError(
            f"The placement needs {len(pools)} pools ({', '.join(pools)}), but "
            f"trainer.nnodes={num_nodes} x trainer.n_gpus_per_node={num_devices} leaves no device "
            f"for {pools[units]!r}. Set trainer.n_gpus_per_node={len(pools)} or more (on a CPU "
            "machine devices are process slots), or placement=colocate, or give every pool "
            "yourself: " + " ".join(f"resource_pool_spec.{p}=[1]" for p in pools)
        )
    part = units // len(pools) + (pools.index(pool) < units % len(pools))
    return [num_devices] * part if by_node else [part] * num_nodes


def settle(config: PPOConfig, named_pools: set[str]) -> list[str]:
    """Drop what this run does not use, refuse roles that cannot work; returns notices to show.

    Changes `config`.

    `named_pools` are the pools that the user wrote: unlike a preset's, they are not dropped.
    """
    inactive = inactive_roles(config)
    dropped = {}
    for role, why in inactive.items():
        if config.role_workers.pop(role, None):
            raise ConfigError(f"role_workers.{role} is set, but this run has no such role: {why}.")
        if role in config.role_mapping:
            dropped[role] = config.role_mapping.pop(role)
    _check_roles(config, inactive)
    spec, used = config.resource_pool_spec, set(config.role_mapping.values())
    idle = [pool for pool in spec if pool not in used]
    for pool in idle:
        if pool in named_pools:
            meant = "".join(
                f" {role} is mapped to it, but not part of this run: {inactive[role]}."
                for role, its_pool in dropped.items()
                if its_pool == pool
            )
            raise ConfigError(
                f"No role uses the pool {pool!r} (role_mapping: {config.role_mapping}).{meant} "
                f"Map a role to it with role_mapping.<role>={pool}, or drop the override "
                f"resource_pool_spec.{pool}={spec[pool]}."
            )
        del spec[pool]
    notices = [
        f"notice: no role of this run uses the pool {pool!r}, it is dropped" for pool in idle
    ]
    if not named_pools and len({sum(sizes) for sizes in spec.values()}) > 1:
        notices.append(
            f"notice: the devices do not divide evenly, the first pools have more: {spec}"
        )
    return notices


def _check_roles(config: PPOConfig, inactive: dict[str, str]) -> None:
    from verl_like.placement.pools import expand_roles

    roles = expand_roles(config.role_mapping)
    for role in BUILT_IN_ROLES:
        if role not in roles and role not in inactive:
            pools = ", ".join(config.resource_pool_spec)
            raise ConfigError(
                f"Role {role!r} is on no pool: set +role_mapping.{role}=<one of {pools}>."
            )
    for role in roles:
        if role not in BUILT_IN_ROLES and role not in config.role_workers:
            raise ConfigError(
                f"role_mapping.{role} is no built-in role "
                f"({', '.join(BUILT_IN_ROLES)}).{nearest(role, BUILT_IN_ROLES)} A role of your "
                f"own needs +role_workers.{role}=<dotted path of its class>."
            )
    for role in config.role_workers:
        if role not in roles:
            raise ConfigError(
                f"role_workers.{role} is set, but role_mapping has no "
                f"{role!r}.{nearest(role, roles)}"
            )
