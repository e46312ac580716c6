"""Memory of a run's roles per device: the table of the plan, and the check against devices.

`workers.memory` computes the memory of a role from the model that its class declares. A recipe
determines the tokens of each role's largest pass (`trainer.ppo.memory`, `trainer.rows.trainer`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from trainer.config.devices import Devices
from trainer.config.schema import RunConfig
from trainer.groups.worker_groups import worker_class
from verl_like.config_key import replace_keys
from verl_like.errors import ConfigError
from verl_like.placement.pools import expand_roles
from verl_like.terminal import draw_table
from workers.memory import (
    GIB,
    LargestPass,
    RoleMemory,
    engine_memory,
    hf_config_of,
    pool_bytes,
    usable_bytes,
)
from workers.parallel.sharding import dims_of
from workers.training.role_model_spec import RoleModelSpec

C = TypeVar("C", bound=RunConfig)

UNKNOWN = "Memory: not known"
HEAD = (
    *("role", "pool", "dtype (weights / compute)", "weights", "gradients", "optimizer"),
    *("gathered", "activations", "KV cache", "offloaded"),
)


def role_models(config: RunConfig) -> dict[str, RoleModelSpec]:
    """Return role -> the model that its class declares, for the roles that have one."""
    models = {}
    for role in expand_roles(config.role_mapping):
        declares = getattr(worker_class(config, role), "role_model", None)
        if declares is not None:
            models[role] = declares(config, config.kind_of(role))
    return models


def describe_axes(config: RunConfig, models: Mapping[str, RoleModelSpec]) -> dict[str, str]:
    """Describe the parallel axes of every role that has any."""
    pools = expand_roles(config.role_mapping)
    words = {
        role: dims_of(sum(config.resource_pool_spec[pools[role]]), model.sharding).describe()
        for role, model in models.items()
    }
    return {role: text for role, text in words.items() if text}


def model_memory(
    config: RunConfig, role: str, model: RoleModelSpec, device_type: str, largest: LargestPass
) -> RoleMemory:
    """Return the memory that a role with this model needs on each device of its pool."""
    pool, trainer = expand_roles(config.role_mapping)[role], config.trainer
    ranks = sum(config.resource_pool_spec[pool])
    saves = trainer.save_freq >= 0 or trainer.save_every_minutes is not None
    copies = saves and trainer.async_save
    return engine_memory(model, role, pool, ranks, device_type, largest, copies)


def memory_table(
    roles: Sequence[RoleMemory],
    devices: Devices,
    brief: bool = False,
    heading: str = "Memory",
) -> str:
    """Return the memory of every role per device and each pool's sum; if `brief`, only the sums."""
    table = []
    for role in roles:
        numbers = (role.weights, role.gradients, role.moments, role.gathered, role.activations)
        table.append((*numbers, role.kv_cache, role.host))
    is_small = not any(number and number >= GIB for row in table for number in row)
    lines: list[tuple[str, ...]] = [HEAD]
    for role, row in zip(roles, table, strict=True):
        cells = (in_gib(number and number * (1024 if is_small else 1)) for number in row)
        lines.append((role.role, role.pool, role.types, *cells))
    unit = "GPU" if devices.type == "cuda" else "device"
    sums = []
    for pool, total in pool_bytes(roles).items():
        largest = max((role for role in roles if role.pool == pool), key=lambda role: role.call)
        peak = f"{pool}: {size_text(total)} per {unit} at peak, in a call of {largest.role}"
        verdict = _verdict(roles, pool, total, devices)
        sums.append(f"{pool} {size_text(total)}{verdict}" if brief else f"{peak}{verdict}")
    copies = [
        f"{pool} {size_text(sum(role.copies for role in roles if role.pool == pool))}"
        for pool in dict.fromkeys(role.pool for role in roles if role.copies)
    ]
    host = []
    if copies:
        host = [f"Host memory per {unit} for checkpoints (trainer.async_save): {', '.join(copies)}"]
    if brief:
        return "\n".join([f"Peak memory per {unit}: {'; '.join(sums)}", *host])
    device = devices.gpu or devices.type
    if devices.gib is not None and not device.endswith("GiB"):
        device += f", {devices.gib:g} GiB"
    units = "MiB" if is_small else "GiB"
    title = f"Estimated {units} per {unit} ({device}), if every row has the maximum length"
    title = f"{heading}: {title}" if heading else title
    table_lines = draw_table(lines, 2, flush_right=True, zero="0")
    asleep = [
        f"{role.role}: sleeps, and frees its memory, while the other roles of its pool run"
        for role in roles
        if role.sleeps
    ]
    return "\n".join([*sums, title, *table_lines, *asleep, *host])


def in_gib(number: float | None) -> str:
    """Return bytes as GiB: with two significant digits, or from 10 GiB on without decimals."""
    if not number:
        return "?" if number is None else "0"
    return f"{number / GIB:.{max(0, 1 - math.floor(math.log10(number / GIB)))}f}"


def size_text(number: float) -> str:
    """Return bytes with their unit: MiB below 1 GiB."""
    return f"{in_gib(number)} GiB" if number >= GIB else f"{in_gib(number * 1024)} MiB"


def _verdict(roles: Sequence[RoleMemory], pool: str, total: float, devices: Devices) -> str:
    if devices.bytes is None:
        return ""
    usable = _usable(roles, pool, devices.type, devices.bytes)
    if total <= usable:
        return f", fits ({_room(usable, devices.bytes)})"
    return f", does NOT fit: {in_gib(total - usable)} GiB too much ({_room(usable, devices.bytes)})"


def _usable(roles: Sequence[RoleMemory], pool: str, device_type: str, device_bytes: int) -> float:
    there = [role for role in roles if role.pool == pool]
    return max(0.0, usable_bytes(there, device_type, device_bytes))


def _room(usable: float, device_bytes: int) -> str:
    """Describe the usable GiB of a device."""
    if usable == device_bytes:
        return f"{in_gib(device_bytes)} GiB usable: the engine's share includes its workspaces"
    return f"{in_gib(usable)} of {in_gib(device_bytes)} GiB usable"


def fits(roles: Sequence[RoleMemory], device_type: str, device_bytes: int) -> bool:
    """Return whether every pool has room for its roles."""
    return all(
        total <= _usable(roles, pool, device_type, device_bytes)
        for pool, total in pool_bytes(roles).items()
    )


TRIED_COUNTS = 8
"""Maximum number of numbers of recomputed layers that are tried."""
MAX_FILLED_SHARE = 0.9
"""Share of a GPU that the roles may need when layers are not recomputed."""


def with_fewest_recomputed_layers(
    config: C,
    devices: Devices,
    models: Mapping[str, RoleModelSpec],
    memories: Callable[[C], Sequence[RoleMemory]],
) -> C:
    """Return the configuration with the fewest recomputed layers with which every pool fits.

    `memories` returns the memory of the roles of a configuration. A tenth of each GPU stays free,
    because a pass that does not fit costs more than recomputation. If nothing fits, all layers are
    recomputed. The configuration stays as it is without GPUs, and for models for which the user has
    decided or whose class cannot recompute.
    """
    pools = {*expand_roles(config.role_mapping).values()}
    if devices.type != "cuda" or devices.bytes is None or not pools <= {*config.resource_pool_spec}:
        return config
    undecided = [
        model
        for model in models.values()
        if model.trains and model.model.enable_gradient_checkpointing is None
    ]
    try:
        undecided = [m for m in undecided if m.meta_module.supports_gradient_checkpointing]
        configs = [hf_config_of(model.model).get_text_config() for model in undecided]
        num_layers = max((text.num_hidden_layers for text in configs), default=0)
        counts = range(0, num_layers, -(-num_layers // TRIED_COUNTS) or 1)
        if any(model.sharding.pp > 1 for model in models.values()):
            counts = counts[:1]
        keys = [
            f"{model.key.removesuffix('.path')}.enable_gradient_checkpointing"
            for model in undecided
        ]
        for count in counts:
            tried = replace_keys(config, dict.fromkeys(keys, count))
            if fits(memories(tried), devices.type, int(MAX_FILLED_SHARE * devices.bytes)):
                return tried
    except (ConfigError, OSError, ValueError):  # the memory cannot be computed
        return config
    return replace_keys(config, dict.fromkeys(keys, True))


def check_fit(
    roles: Sequence[RoleMemory], device_type: str, device_bytes: int, remedies: Mapping[str, str]
) -> None:
    """Raise if a pool has no room for its roles.

    `remedies` maps `model states`, `activations` and `KV cache` to advice. In the error, the advice
    for the largest of them comes first.
    """
    for pool, total in pool_bytes(roles).items():
        usable = _usable(roles, pool, device_type, device_bytes)
        if total > usable:
            roles = [role for role in roles if role.pool == pool]
            parts = "; ".join(
                f"{role.role}: {in_gib(role.resident)} GiB resident and {in_gib(role.call)} GiB "
                "in a call"
                for role in roles
            )
            sizes = {
                "model states": max(
                    r.weights + r.gradients + r.moments + r.gathered for r in roles
                ),
                "activations": max(r.activations or 0.0 for r in roles),
                "KV cache": max(r.kv_cache for r in roles),
            }
            ways = sorted(remedies, key=sizes.__getitem__, reverse=True)
            raise ConfigError(
                f"pool {pool!r} does not fit: its roles need {in_gib(total)} GiB per "
                f"{'GPU' if device_type == 'cuda' else 'device'}, {in_gib(total - usable)} GiB too "
                f"much ({_room(usable, device_bytes)}). {parts}. First "
                f"{'; then '.join(remedies[part] for part in ways if sizes[part])}."
            )
