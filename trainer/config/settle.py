"""Settle a composed configuration into a run's configuration.

    config, notices = settle(recipe, composed, keys)

Each step takes a configuration and returns another. The result is read-only. Values that depend on
files, such as the largest passes, are settled when the run starts (`RunRecipe.resolve`).

A preset (`placement=split`) names pools and roles. The user's settings take precedence, and the
preset's pools share the devices that the user's pools leave. So if you give a role its own pool,
you need not shrink another pool by hand. `verl_like.placement` then checks the pools against the
existing nodes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from trainer.config.devices import run_devices, with_simulated
from trainer.config.schema import Recipe, RunConfig, where_it_is_now
from trainer.config.unused_keys import notice_of, without_unread
from verl_like.config_key import freeze, replace_keys
from verl_like.errors import ConfigError, nearest
from verl_like.placement.pools import expand_roles, roles_by_pool, roles_named
from verl_like.registry import load_object
from workers.config.rollout import RolloutConfig

C = TypeVar("C", bound=RunConfig)
SEQUENCES_ON_GPUS, BUCKET_MB_ON_GPUS = 1024, 512.0
"""Defaults on GPUs: vLLM's `max_num_seqs`, and the size of weight buckets."""


def settle(recipe: Recipe[C], composed: C, keys: Collection[str]) -> tuple[C, list[str]]:
    """Return the read-only configuration of the run, and notices to show.

    `keys` are the keys that the user set. A key that this run does not read gets a notice and its
    default value, so that it cannot have an effect anywhere. Roles that cannot work are errors.
    """
    config = with_simulated(composed, keys)
    config, about_engine = _with_engine(config, keys)
    mapping = drop_preset_names(config.role_mapping, names_below("role_mapping", keys))
    config, completed = recipe.complete(replace_keys(config, {"role_mapping": mapping}), keys)
    config, placed = place_roles(recipe, config, keys)
    config, unused = without_unread(config, keys)
    return freeze(config), [*about_engine, *completed, *placed, *unused]


def _with_engine(config: C, keys: Collection[str]) -> tuple[C, list[str]]:
    """Choose the engine of a recipe that generates, and its sizes, unless the user has set them."""
    policy = getattr(config, "actor_rollout_ref", None)
    rollout = getattr(policy, "rollout", None)
    if not isinstance(rollout, RolloutConfig):
        return config, []
    from workers.rollout.build_engine import notices_of_engine, resolve_engine

    device_type = run_devices(config.trainer).type
    name = resolve_engine(rollout.name, device_type)
    changes: dict[str, Any] = {"actor_rollout_ref.rollout.name": name}
    if device_type == "cuda":
        sizes = {"update_weights_bucket_megabytes": BUCKET_MB_ON_GPUS}
        if name == "vllm" and not rollout.server_urls:
            sizes["max_num_seqs"] = SEQUENCES_ON_GPUS
        sizes = {f"actor_rollout_ref.rollout.{key}": value for key, value in sizes.items()}
        changes |= {key: value for key, value in sizes.items() if key not in keys}
    is_assumed = rollout.name == "auto" and config.trainer.simulate is not None
    return replace_keys(config, changes), notices_of_engine(name, device_type, is_assumed)


BYTES_OF_A_WEIGHT = {"trained": 16, "frozen": 2}
"""Trained: a float32 weight with its gradient and two moments. Frozen: a bfloat16 weight."""


def roles_of(recipe: Recipe[Any]) -> list[str]:
    """Return all roles that a recipe's presets place, with aliases expanded."""
    pool_of_role: dict[str, str] = {}
    for pools in recipe.placements.values():
        for pool, roles in pools.items():
            pool_of_role |= expand_roles(dict.fromkeys(roles, pool))
    return list(pool_of_role)


def drop_preset_names(role_mapping: Mapping[str, str], named: Collection[str]) -> dict[str, str]:
    """Return the mapping without the preset's entries for roles that the user has `named`.

    The user's `rollout` reduces a preset's `actor_rollout` to `actor`.
    """
    users = {role for name in named if name in role_mapping for role in roles_named(name)}
    settled: dict[str, str] = {}
    for name, pool in role_mapping.items():
        left = [role for role in roles_named(name) if role not in users]
        if name in named or len(left) == len(roles_named(name)):
            settled[name] = pool
        else:
            settled |= dict.fromkeys(left, pool)
    return settled


def place_roles(recipe: Recipe[C], config: C, keys: Collection[str]) -> tuple[C, list[str]]:
    """Return the configuration with only this run's roles and pools, and notices to show.

    `keys` are the keys that the user set. A pool that the user names and no role uses is an
    error; a preset's pool without roles is left out.
    """
    inactive = recipe.inactive_roles(config)
    notices = []
    for role, why in inactive.items():
        names = [key for key in (f"role_workers.{role}", f"role_mapping.{role}") if key in keys]
        if names:
            notices.append(notice_of(names, f"this run has no role {role!r}, because {why}"))

    weights, mapped_before = _weight_bytes(config), config.role_mapping
    config = _with_roles(recipe, config, inactive)
    _check_roles(config, roles_of(recipe), inactive)
    config = _with_slots(config, keys)

    shares = share_devices(config, weights)
    spec = config.resource_pool_spec | shares
    if shares and config.trainer.nnodes > 1:  # the plan assigns nodes in the order of pools
        spec = {pool: spec[pool] for pool in spec if pool not in shares} | shares
    used, named_pools = set(config.role_mapping.values()), names_below("resource_pool_spec", keys)
    for pool in sorted(named_pools - used):
        roles = [role for role in inactive if mapped_before.get(role) == pool]
        presets = [name for name, pools in recipe.placements.items() if pool in pools]
        raise _unused_pool(config, pool, {role: inactive[role] for role in roles}, presets)

    unused = [pool for pool in spec if pool not in used]
    spec = {pool: sizes for pool, sizes in spec.items() if pool in used}
    is_only_role = bool(shares) and len(expand_roles(config.role_mapping)) == 1
    if "placement" in keys and len(spec) == 1 and (unused or is_only_role):
        why = f"this run has no role for {', '.join(unused)}, so all roles share {', '.join(spec)}"
        if not unused:
            why = "this run has only one role"
        notices.append(notice_of(["placement"], why))
    config = replace_keys(config, {"resource_pool_spec": spec})
    roles_by_pool(spec, config.role_mapping)  # raises if a pool does not exist
    if shares and not named_pools and len({sum(sizes) for sizes in spec.values()}) > 1:
        notices.append(
            f"note: the pools get different numbers of devices: {spec}. Pools with only frozen "
            "models get fewer, and of a remainder, the first pools get one more each."
        )
    return config, notices


def _with_roles(recipe: Recipe[C], config: C, inactive: Collection[str]) -> C:
    """Leave out roles that are not part of the run, and add those that its settings need."""
    mapping = {role: pool for role, pool in config.role_mapping.items() if role not in inactive}
    workers = {
        role: where_it_is_now(path)
        for role, path in config.role_workers.items()
        if role not in inactive
    }
    pools = expand_roles(mapping)
    for role, (worker, neighbor) in recipe.extra_roles(config).items():
        workers.setdefault(role, worker)
        if neighbor in pools:
            mapping.setdefault(role, pools[neighbor])
    return replace_keys(config, {"role_mapping": mapping, "role_workers": workers})


def _with_slots(config: C, keys: Collection[str]) -> C:
    """Give a machine without GPUs as many slots as its pools need, unless the user set them."""
    trainer, spec = config.trainer, config.resource_pool_spec
    is_this_machine = trainer.nnodes == 1 and run_devices(trainer).type == "cpu"
    if not is_this_machine or "trainer.n_gpus_per_node" in keys:
        return config
    used = spec.keys() & set(config.role_mapping.values())
    slots = sum(max(spec[pool], default=0) or 1 for pool in used)
    return replace_keys(config, {"trainer.n_gpus_per_node": max(slots, trainer.n_gpus_per_node)})


def share_devices(config: RunConfig, weights: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the sizes of a preset's pools, which share the free devices by `weights`.

    Pools get whole nodes if there is at least one per pool. Otherwise, they share the devices of
    every node that has at least one device for each of them.
    """
    spec, used = config.resource_pool_spec, set(config.role_mapping.values())
    sized = {pool: sizes for pool, sizes in spec.items() if sizes}
    shared = [pool for pool, sizes in spec.items() if not sizes and pool in used]
    if not shared:
        return {}
    used_own = {pool: sizes for pool, sizes in sized.items() if pool in used}
    free = [devices for devices in _left_on_nodes(config, used_own) if devices > 0]
    wide = [devices for devices in free if devices >= len(shared)]
    if len(free) < len(shared) and not wide:
        raise _too_few(config, shared, used_own)
    by_pool = [weights[pool] for pool in shared]
    if len(free) >= len(shared):
        shares, first = {}, 0
        for pool, nodes in zip(shared, _shares(len(free), by_pool), strict=True):
            shares[pool], first = free[first : first + nodes], first + nodes
        return shares
    on_nodes = [_shares(devices, by_pool) for devices in wide]
    return {pool: [node[number] for node in on_nodes] for number, pool in enumerate(shared)}


def _weight_bytes(config: RunConfig) -> dict[str, int]:
    """Return preset pool -> bytes per weight: more if one of its models, active or not, is trained.

    A user's class counts as a trained model.
    """
    pools = [pool for pool, sizes in config.resource_pool_spec.items() if not sizes]
    bytes_of_pool = dict.fromkeys(pools, BYTES_OF_A_WEIGHT["frozen"])
    for role, pool in expand_roles(config.role_mapping).items():
        path = config.role_workers.get(role) or ""
        if len(bytes_of_pool) > 1 and pool in bytes_of_pool:
            ours = path.startswith("workers.") and load_object(path, f"role_workers.{role}")
            if not getattr(ours, "is_frozen", False):
                bytes_of_pool[pool] = BYTES_OF_A_WEIGHT["trained"]
    return bytes_of_pool


def _shares(total: int, weights: Sequence[int]) -> list[int]:
    """Divide devices by weight: one each, then one at a time to the smallest share per weight."""
    shares = [1] * len(weights)
    for _ in range(total - len(shares)):
        shares[min(range(len(shares)), key=lambda i: shares[i] / weights[i])] += 1
    return shares


def _left_on_nodes(config: RunConfig, user_pools: Mapping[str, Sequence[int]]) -> list[int]:
    """Return the free devices of every node after the user's pools are placed first-fit."""
    left = [config.trainer.n_gpus_per_node] * config.trainer.nnodes
    for pool, per_node in user_pools.items():
        taken: list[int] = []
        for count in per_node:
            need = _devices_of(config, pool, count)
            others = [node for node in range(len(left)) if node not in taken]
            node = next((node for node in others if left[node] >= need), None)
            if node is None:
                return []
            left[node] -= need
            taken.append(node)
    return left


def _devices_of(config: RunConfig, pool: str, count: int) -> int:
    """Return the devices that `count` processes take: 0 if the pool is kept off the GPUs."""
    resources = config.pool_resources.get(pool)
    if resources is None or config.trainer.device == "cpu":
        return count
    if resources.device == "cpu":
        return 0
    return math.ceil(count * (resources.gpus or 1.0))


def _too_few(
    config: RunConfig, pools: Sequence[str], user_pools: Mapping[str, Sequence[int]]
) -> ConfigError:
    """Return the error for a preset with more pools than devices, and the alternatives."""
    num_nodes, num_devices = config.trainer.nnodes, config.trainer.n_gpus_per_node
    for pool, per_node in user_pools.items():
        if len(per_node) > num_nodes:
            return ConfigError(
                f"resource_pool_spec.{pool}={list(per_node)} has a number for each of "
                f"{len(per_node)} nodes, but trainer.nnodes={num_nodes}. List {num_nodes} "
                f"numbers, one per node, or set trainer.nnodes={len(per_node)}."
            )
    taken = sum(max(_devices_of(config, pool, n) for n in user_pools[pool]) for pool in user_pools)
    left = max(num_devices - taken, 0)
    instead = ", or placement=colocate, where roles share processes" if left else ""
    texts = [f"resource_pool_spec.{pool}={list(user_pools[pool])}" for pool in user_pools]
    first_words = f" {' and '.join(texts)} come{'s' * (len(texts) == 1)} first." if texts else ""
    return ConfigError(
        f"trainer.nnodes={num_nodes} x trainer.n_gpus_per_node={num_devices} leaves no device for "
        f"{pools[min(left, len(pools) - 1)]!r}.{first_words} Each of these pools needs at least "
        f"one device: {', '.join(pools)}. Set trainer.n_gpus_per_node={taken + len(pools)} or "
        f"more (without GPUs, devices are process slots){instead}."
    )


def names_below(section: str, keys: Collection[str]) -> set[str]:
    """Return the names that the user set in a section such as `resource_pool_spec`."""
    prefix = f"{section}."
    return {key.removeprefix(prefix) for key in keys if key.startswith(prefix)}


def _unused_pool(
    config: RunConfig, pool: str, inactive: Mapping[str, str], presets: Sequence[str]
) -> ConfigError:
    preset = f" It is a pool of placement={presets[0]}." if presets else ""
    inactive_texts = "".join(
        f" {role} is mapped to it, but not part of this run: {why}."
        for role, why in inactive.items()
    )
    return ConfigError(
        f"no role uses the pool {pool!r} (role_mapping: {config.role_mapping}).{preset}"
        f"{inactive_texts} Map a role to it with role_mapping.<role>={pool}, or drop the override "
        f"resource_pool_spec.{pool}={config.resource_pool_spec[pool]}."
    )


def _check_roles(config: RunConfig, own_roles: Sequence[str], inactive: Mapping[str, str]) -> None:
    """Raise unless each role has a pool and a worker class, and each worker class has a role."""
    roles = expand_roles(config.role_mapping)

    for role in own_roles:
        if role not in roles and role not in inactive:
            pools = ", ".join(config.resource_pool_spec)
            raise ConfigError(
                f"role {role!r} is on no pool. Set +role_mapping.{role}=<one of {pools}>."
            )

    for role in roles:
        if role not in own_roles and role not in config.role_workers:
            raise ConfigError(
                f"role_mapping.{role}: {role!r} is not a role of this command "
                f"({', '.join(own_roles)}).{nearest(role, own_roles)} For a custom role, set "
                f"+role_workers.{role}=<dotted path of its class>."
            )
        if not config.role_workers.get(role):
            raise ConfigError(
                f"role {role!r} has no worker class. Set role_workers.{role}=<dotted path of its "
                "class>."
            )

    for role in config.role_workers:
        if role not in roles:
            raise ConfigError(
                f"role_workers.{role} is set, but role_mapping has no "
                f"{role!r}.{nearest(role, roles)} Map it with role_mapping.{role}=<pool>, or leave "
                f"out role_workers.{role}."
            )
