"""Memory of a run's roles per device: the table of the plan, and the check against devices.

`workers.memory` computes the memory of a role from the model that its class declares. A recipe
determines the tokens of each role's largest pass (`trainer.ppo.memory`, `trainer.rows.preflight`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.config.devices import Devices
from trainer.config.schema import RunConfig
from trainer.groups.worker_groups import worker_class
from verl_like.errors import ConfigError
from verl_like.placement.roles import expand_roles
from verl_like.terminal import draw_table
from workers.memory import (
    GIB,
    LargestPass,
    RoleMemory,
    RoleModelSpec,
    memory_of,
    pool_bytes,
    usable_bytes,
)
from workers.parallel.sharding import dims_of

HEAD = (
    *("role", "pool", "dtype (weights / compute)", "weights", "gradients", "optimizer state"),
    *("all-gathered layers", "activations", "KV cache", "in host memory"),
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
    saves = trainer.save_freq > 0 or trainer.save_every_minutes is not None
    copies = saves and trainer.async_save
    return memory_of(model, role, pool, ranks, device_type, largest, copies)


def memory_table(
    roles: Sequence[RoleMemory],
    devices: Devices,
    max_columns: int | None = None,
    brief: bool = False,
    heading: str = "Memory",
) -> str:
    """Return the GiB of every role per device and each pool's sum; if `brief`, only the sums."""
    table = []
    for role in roles:
        numbers = (role.weights, role.gradients, role.moments, role.gathered, role.activations)
        table.append((*numbers, role.kv_cache, role.host))
    decimals = _decimals(max((n for row in table for n in row if n is not None), default=0))
    lines: list[tuple[str, ...]] = [HEAD]
    for role, row in zip(roles, table, strict=True):
        cells = [_gib(number, decimals) for number in row]
        lines.append((role.role, role.pool, role.types, *cells))
    sums = [
        f"{pool}{'' if brief else ':'} {_gib(total)} GiB{'' if brief else ' per device at peak'}"
        f"{_verdict(roles, pool, total, devices)}"
        for pool, total in pool_bytes(roles).items()
    ]
    if not brief:
        asleep = [role.role for role in roles if role.sleeps]
        sums += [f"{role}: sleeps while the other roles of its pool run" for role in asleep]
    for pool in dict.fromkeys(role.pool for role in roles if role.copies):
        copies = sum(role.copies for role in roles if role.pool == pool)
        sums.append(
            f"{pool}: {_gib(copies)} GiB of host memory per device for checkpoints "
            "(trainer.async_save)"
        )
    if brief:
        return f"Peak memory per device: {'; '.join(sums)}"
    device = devices.gpu or devices.type
    if devices.gib is not None and not device.endswith("GiB"):
        device += f", {devices.gib:g} GiB"
    title = f"Estimated GiB per device ({device}), if every row has the maximum length"
    title = f"{heading}: {title}" if heading else title
    return "\n".join([title, *draw_table(lines, max_columns, 3, flush_right=True), *sums])


def _decimals(number: float) -> int:
    """Return how many decimals to print for this number of bytes in GiB."""
    return 1 if number >= GIB / 10 or not number else 4


def _gib(number: float | None, decimals: int | None = None) -> str:
    if number is None:
        return "?"
    return f"{number / GIB:.{_decimals(number) if decimals is None else decimals}f}"


def _verdict(roles: Sequence[RoleMemory], pool: str, total: float, devices: Devices) -> str:
    if devices.bytes is None:
        return ""
    usable = _usable(roles, pool, devices.type, devices.bytes)
    verdict = "fits" if total <= usable else "does NOT fit"
    return f" ({_room(usable, devices.bytes)}: {verdict})"


def _usable(roles: Sequence[RoleMemory], pool: str, device_type: str, device_bytes: int) -> float:
    return usable_bytes([role for role in roles if role.pool == pool], device_type, device_bytes)


def _room(usable: float, device_bytes: int) -> str:
    """Describe the usable GiB of a device."""
    if usable == device_bytes:
        return f"{device_bytes / GIB:.1f} GiB are usable"
    return f"{usable / GIB:.1f} of {device_bytes / GIB:.1f} GiB are usable"


def fits(roles: Sequence[RoleMemory], device_type: str, device_bytes: int) -> bool:
    """Return whether every pool has room for its roles."""
    return all(
        total <= _usable(roles, pool, device_type, device_bytes)
        for pool, total in pool_bytes(roles).items()
    )


def check_fit(
    roles: Sequence[RoleMemory], device_type: str, device_bytes: int, ways_out: str
) -> None:
    """Raise if a pool has no room for its roles; `ways_out` names the recipe's keys."""
    for pool, total in pool_bytes(roles).items():
        usable = _usable(roles, pool, device_type, device_bytes)
        if total > usable:
            parts = "; ".join(
                f"{role.role}: {_gib(role.resident)} GiB resident and "
                f"{_gib(role.call)} GiB in a call"
                for role in roles
                if role.pool == pool
            )
            raise ConfigError(
                f"Pool {pool!r} does not fit: its roles need {_gib(total)} GiB per device; "
                f"{_room(usable, device_bytes)}. {parts}. {ways_out}"
            )
