"""Memory of a run's roles on their devices: a table for the plan, and held against the device.

What a role takes is counted from the model that its class says it holds (`workers.memory`). A
recipe says how many tokens a pass of each has (`trainer.ppo.memory`, `trainer.rows.preflight`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.config.devices import Devices
from trainer.config.schema import RunConfig, TrainerConfig
from trainer.groups.worker_groups import worker_class
from verl_like.errors import ConfigError
from verl_like.placement.roles import expand_roles
from verl_like.terminal import draw_table
from workers.memory import GIB, HeldModel, LargestPass, RoleMemory, memory_of, pool_bytes
from workers.parallel.sharding import dims_of


def held_model(config: RunConfig, role: str) -> HeldModel | None:
    """The model that a role's class says it holds."""
    declares = getattr(worker_class(config, role), "held_model", None)
    return declares(config, config.kind_of(role)) if declares is not None else None


def axes_in_words(config: RunConfig, models: Mapping[str, HeldModel]) -> dict[str, str]:
    """Role -> the axes of its ranks, of roles whose ranks have several."""
    pools, found = expand_roles(config.role_mapping), {}
    for role, held in models.items():
        words = dims_of(sum(config.resource_pool_spec[pools[role]]), held.sharding).in_words()
        if words:
            found[role] = words
    return found


def held_memory(
    config: RunConfig, role: str, held: HeldModel, device_type: str, largest: LargestPass
) -> RoleMemory:
    """What a role with such a model takes on each device of its pool."""
    pool = expand_roles(config.role_mapping)[role]
    ranks = sum(config.resource_pool_spec[pool])
    copies = _writes_copies(config.trainer)
    return memory_of(held, role, pool, ranks, device_type, largest, copies)


def _writes_copies(trainer: TrainerConfig) -> bool:
    """Whether checkpoints are written from copies while the run goes on."""
    writes = trainer.save_freq > 0 or trainer.save_every_minutes is not None
    return writes and trainer.async_save


HEAD = (
    *("role", "pool", "weights / compute", "weights", "gradients", "moments"),
    *("whole layers", "activations", "KV cache", "of it in host memory"),
)


def memory_table(
    roles: Sequence[RoleMemory],
    devices: Devices,
    max_columns: int | None = None,
    brief: bool = False,
) -> str:
    """The roles with their GiB on each device, and the sum of every pool; if brief, sums alone."""
    lines: list[tuple[str, ...]] = [HEAD]
    for role in roles:
        numbers = (role.weights, role.gradients, role.moments, role.whole, role.activations)
        cells = [_gib(number) for number in (*numbers, role.kv_cache, role.host)]
        lines.append((role.role, role.pool, role.types, *cells))
    at_most = "" if brief else " on each device at most"
    sums = [
        f"{pool}: {_gib(total)} GiB{at_most}" + _beside(total, devices.bytes)
        for pool, total in pool_bytes(roles).items()
    ]
    if not brief:
        asleep = [role.role for role in roles if role.sleeps]
        sums += [f"{role}: asleep while others of its pool compute" for role in asleep]
    for pool in dict.fromkeys(role.pool for role in roles if role.copies):
        copies = sum(role.copies for role in roles if role.pool == pool)
        sums.append(
            f"{pool}: {_gib(copies)} GiB of host memory for each device to write checkpoints from "
            "(trainer.async_save)"
        )
    if brief:
        return f"Memory at most: {'; '.join(sums)}"
    device = devices.card or devices.type
    title = f"Memory (GiB on each device, {device}, from shapes; rows of full length)"
    return "\n".join([title, *draw_table(lines, max_columns, 3, flush_right=True), *sums])


def _gib(number: float | None) -> str:
    if number is None:
        return "?"
    return f"{number / GIB:.1f}" if number >= GIB / 10 or not number else f"{number / GIB:.4f}"


def _beside(total: float, device_bytes: int | None) -> str:
    if device_bytes is None:
        return ""
    verdict = "fits" if total <= device_bytes else "does NOT fit"
    return f", of {device_bytes / GIB:.1f}: {verdict}"


def check_fit(roles: Sequence[RoleMemory], device_bytes: int, ways_out: str) -> None:
    """Refuse roles that do not fit on their devices; `ways_out` names the recipe's keys."""
    for pool, total in pool_bytes(roles).items():
        if total > device_bytes:
            parts = "; ".join(_story(role) for role in roles if role.pool == pool)
            raise ConfigError(
                f"Pool {pool!r} does not fit: its roles take {_gib(total)} GiB on each device, "
                f"which has {_gib(device_bytes)}. {parts}. {ways_out}"
            )


def _story(role: RoleMemory) -> str:
    return f"{role.role}: {_gib(role.kept)} kept, {_gib(role.call)} in a call"
