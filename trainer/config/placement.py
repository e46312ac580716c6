"""`placement=<preset>`: its pools and roles, and the roles of a run.

`preset_tree` is what a preset puts into the tree, `settle_names` what the user's own words leave of
it; `trainer.config.shares` gives its pools their sizes; `settle` drops what a run does not
use. All of it is decided from the configuration alone: `verl_like.placement` then checks the pools
against the nodes that there are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from trainer.config.recipe import Recipe
from trainer.config.schema import RunConfig
from trainer.config.shares import own_pools_first
from verl_like.errors import ConfigError, nearest
from verl_like.placement.roles import expand_roles, roles_named


def preset_tree(recipe: Recipe[Any], preset: str) -> dict[str, Any]:
    """`resource_pool_spec` and `role_mapping` of a preset, as Hydra gets them."""
    pools = recipe.placements[preset]
    names = ",".join(pools)
    return {
        "resource_pool_spec": {
            pool: f"${{share:{recipe.name},{pool},[{names}]}}" for pool in pools
        },
        "role_mapping": {role: pool for pool, roles in pools.items() for role in roles},
    }


def roles_of(recipe: Recipe[Any]) -> list[str]:
    """The roles of a recipe's own: all that its presets place, aliases written out."""
    found: dict[str, str] = {}
    for pools in recipe.placements.values():
        for pool, roles in pools.items():
            found |= expand_roles(dict.fromkeys(roles, pool))
    return list(found)


def expand_shorthands(recipe: Recipe[Any], overrides: Sequence[str]) -> list[str]:
    """`overrides` with words such as `colocate_all=true` written out.

    Beside another word on the placement they are refused.
    """
    chosen, kept = [], []
    for override in overrides:
        word, _, value = override.partition("=")
        if word not in recipe.shorthands:
            kept.append(override)
        elif _is_true(word, value):
            chosen.append(word)

    meant = _meaning(recipe, sorted(set(chosen)))
    rivals = [override for override in kept if _is_on_placement(override)]
    if chosen and rivals:
        raise ConfigError(
            f"{' and '.join(sorted(set(chosen)))} and {' and '.join(rivals)} both say where roles "
            f"run; keep one of them. The shorthand stands for {' '.join(meant)}."
        )
    return kept + meant


def _meaning(recipe: Recipe[Any], words: Sequence[str]) -> list[str]:
    """The overrides that shorthands stand for; one pool for all says more than the others."""
    overrides: dict[str, str] = {}
    for word in words:
        overrides |= recipe.shorthands[word]

    for word in words:
        if recipe.shorthands[word] == {"placement": "colocate"}:
            overrides = dict(recipe.shorthands[word])
    return [f"{key}={value}" for key, value in overrides.items()]


def _is_on_placement(override: str) -> bool:
    return override.lstrip("+~").startswith(("placement=", "role_mapping", "resource_pool_spec"))


def _is_true(word: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ConfigError(f"{word}={value}: true or false.")
    return value.lower() == "true"


def settle_names(tree: Any, keys: Collection[str]) -> None:
    """Let what the user says of roles and pools come before what a preset does, in the merged tree.

    `keys` are those that the user set.
    """
    named = names_below("role_mapping", keys)
    mapping = OmegaConf.to_container(tree.role_mapping, resolve=False)
    assert isinstance(mapping, dict), "role_mapping is a section"
    tree.role_mapping = own_names_first({str(name): mapping[name] for name in mapping}, named)
    if tree.trainer.nnodes > 1:
        sizes = OmegaConf.to_container(tree.resource_pool_spec, resolve=False)
        assert isinstance(sizes, dict), "resource_pool_spec is a section"
        tree.resource_pool_spec = own_pools_first({str(pool): sizes[pool] for pool in sizes})


def own_names_first(role_mapping: Mapping[str, str], named: Collection[str]) -> dict[str, str]:
    """The mapping without a preset's word on the roles that the user has `named`.

    `rollout` of theirs leaves `actor` of a preset's `actor_rollout`.
    """
    own = {role for name in named if name in role_mapping for role in roles_named(name)}
    settled: dict[str, str] = {}
    for name, pool in role_mapping.items():
        left = [role for role in roles_named(name) if role not in own]
        if name in named or len(left) == len(roles_named(name)):
            settled[name] = pool
        else:
            settled |= dict.fromkeys(left, pool)
    return settled


def settle(recipe: Recipe[Any], config: RunConfig, keys: Collection[str]) -> list[str]:
    """Drop from `config` what this run does not use, refuse roles that cannot work.

    `keys` are those that the user set: a pool or a worker class of theirs that nothing uses is
    refused, one of a preset or of the recipe's YAML is dropped. Returns notices to show.
    """
    inactive = recipe.inactive_roles(config)
    dropped = _drop_inactive_roles(config, inactive, keys)
    _add_extra_roles(config, recipe.extra_roles(config))
    _check_roles(config, roles_of(recipe), inactive)

    notices = []
    for role in sorted(names_below("role_mapping", keys) & inactive.keys()):
        notices.append(f"notice: role_mapping.{role} has no effect here: {inactive[role]}")
    named_pools = names_below("resource_pool_spec", keys)
    used = set(config.role_mapping.values())
    for pool in [pool for pool in config.resource_pool_spec if pool not in used]:
        if pool in named_pools:
            roles = [role for role, its_pool in dropped.items() if its_pool == pool]
            raise _unused_pool(config, pool, {role: inactive[role] for role in roles})
        del config.resource_pool_spec[pool]
        notices.append(f"notice: no role of this run uses the pool {pool!r}, it is dropped")

    spec = config.resource_pool_spec
    if (
        recipe.shares_devices
        and not named_pools
        and len({sum(sizes) for sizes in spec.values()}) > 1
    ):
        notices.append(
            f"notice: the devices do not divide evenly, the first pools have more: {spec}"
        )
    return notices


def names_below(section: str, keys: Collection[str]) -> set[str]:
    """The names of their own that the user set in a section such as `resource_pool_spec`."""
    prefix = f"{section}."
    return {key.removeprefix(prefix) for key in keys if key.startswith(prefix)}


def _drop_inactive_roles(
    config: RunConfig, inactive: Mapping[str, str], keys: Collection[str]
) -> dict[str, str]:
    """Take the roles that this run does not need out of the mapping; returns role -> pool."""
    dropped = {}
    named_workers = names_below("role_workers", keys)
    for role, why in inactive.items():
        if config.role_workers.pop(role, None) and role in named_workers:
            raise ConfigError(f"role_workers.{role} is set, but this run has no such role: {why}.")
        if role in config.role_mapping:
            dropped[role] = config.role_mapping.pop(role)
    return dropped


def _add_extra_roles(config: RunConfig, extra: Mapping[str, tuple[str, str]]) -> None:
    """Map the roles that a setting brings along, each beside its neighbour."""
    pools = expand_roles(config.role_mapping)
    for role, (worker, neighbour) in extra.items():
        config.role_workers.setdefault(role, worker)
        if neighbour in pools:
            config.role_mapping.setdefault(role, pools[neighbour])


def _unused_pool(config: RunConfig, pool: str, inactive: Mapping[str, str]) -> ConfigError:
    meant = "".join(
        f" {role} is mapped to it, but not part of this run: {why}."
        for role, why in inactive.items()
    )
    return ConfigError(
        f"No role uses the pool {pool!r} (role_mapping: {config.role_mapping}).{meant} Map a role "
        f"to it with role_mapping.<role>={pool}, or drop the override "
        f"resource_pool_spec.{pool}={config.resource_pool_spec[pool]}."
    )


def _check_roles(config: RunConfig, own_roles: Sequence[str], inactive: Mapping[str, str]) -> None:
    roles = expand_roles(config.role_mapping)

    for role in own_roles:
        if role not in roles and role not in inactive:
            pools = ", ".join(config.resource_pool_spec)
            raise ConfigError(
                f"Role {role!r} is on no pool: set +role_mapping.{role}=<one of {pools}>."
            )

    for role in roles:
        if role not in own_roles and role not in config.role_workers:
            raise ConfigError(
                f"role_mapping.{role} is no built-in role "
                f"({', '.join(own_roles)}).{nearest(role, own_roles)} A role of your "
                f"own needs +role_workers.{role}=<dotted path of its class>."
            )
        if not config.role_workers.get(role):
            raise ConfigError(
                f"Role {role!r} has no worker class: set role_workers.{role}=<dotted path of its "
                "class>."
            )

    for role in config.role_workers:
        if role not in roles:
            raise ConfigError(
                f"role_workers.{role} is set, but role_mapping has no "
                f"{role!r}.{nearest(role, roles)}"
            )
