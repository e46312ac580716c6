"""Search placements of roles on GPUs: all partitions into pools, sized by their share of work.

    for groups in partitions(["actor", "rollout", "critic"]):
        placement = allocate(groups, [1, 2, 4, 8], 8, lay_out)

Roles of a pool take turns and pools run in parallel, so a stage takes as long as its slowest pool,
and a step takes the sum of its stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from trainer.tools.planner.cost import Device
from workers.memory import RoleMemory, pool_bytes, usable_bytes

Seconds = tuple[float, ...]
"""Seconds of every stage."""


@dataclass(frozen=True)
class RoleLayout:
    """A layout of a role on the GPUs of a pool."""

    role: str
    seconds: Seconds
    memory: RoleMemory
    keys: dict[str, str] = field(default_factory=dict, hash=False)
    """Overrides that set this layout."""

    @cached_property
    def total(self) -> float:
        """Seconds of all stages."""
        return sum(self.seconds)

    def beats(self, other: RoleLayout) -> bool:
        """Return whether this layout is at least as good in time and memory, and better in one."""
        mine, others = (
            (layout.total, layout.memory.resident, layout.memory.call) for layout in (self, other)
        )
        return all(a <= b for a, b in zip(mine, others, strict=True)) and mine != others


@dataclass(frozen=True)
class PoolLayout:
    """Roles that share a number of GPUs."""

    gpus: int
    layouts: tuple[RoleLayout, ...]
    saved: Seconds = ()
    """Seconds per stage that the roles save by sharing a pool."""

    @property
    def roles(self) -> list[str]:
        """The roles, in order."""
        return [layout.role for layout in self.layouts]

    @cached_property
    def seconds(self) -> Seconds:
        """Seconds of every stage: the roles take turns."""
        stages = zip(*(layout.seconds for layout in self.layouts), strict=True)
        saved = self.saved or (0.0,) * len(self.layouts[0].seconds)
        return tuple(float(sum(a) - b) for a, b in zip(stages, saved, strict=True))

    @cached_property
    def bytes(self) -> float:
        """Peak bytes on each GPU."""
        roles = [replace(layout.memory, pool="") for layout in self.layouts]
        return pool_bytes(roles)[""]


@dataclass(frozen=True)
class PlannedPlacement:
    """Pools that run in parallel."""

    pools: tuple[PoolLayout, ...]
    least: Seconds = ()
    """Seconds of the driver's own work per stage."""

    @cached_property
    def seconds(self) -> Seconds:
        """Seconds of every stage."""
        pools = (pool.seconds for pool in self.pools)
        return tuple(map(max, zip(*pools, *([self.least] if self.least else []), strict=True)))

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds)

    @property
    def gpus(self) -> int:
        """GPUs of all pools."""
        return sum(pool.gpus for pool in self.pools)

    def by_speed(self) -> tuple[float, int]:
        """Return the sort key: fastest first, then fewest GPUs."""
        return self.step, self.gpus

    @property
    def summary(self) -> str:
        """Roles and GPUs of every pool in words."""
        return " | ".join(f"{' + '.join(pool.roles)} on {pool.gpus}" for pool in self.pools)

    def limit(self, stages: Sequence[str]) -> str:
        """Describe the longest stage, and the roles that it waits for."""
        number = max(range(len(stages)), key=self.seconds.__getitem__)
        return f"{stages[number]} of {self.slowest_in(number)}"

    def slowest_in(self, number: int) -> str:
        """Return the roles that the stage with this number waits for, or `reward functions`."""
        pool = max(self.pools, key=lambda pool: pool.seconds[number])
        if self.least and self.least[number] > pool.seconds[number]:
            return "reward functions"
        return " + ".join(layout.role for layout in pool.layouts if layout.seconds[number] > 0)


def partitions(roles: Sequence[str]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield all ways to divide the roles into groups."""
    if not roles:
        yield ()
        return
    first, *others = roles
    for groups in partitions(others):
        yield ((first,), *groups)
        for number, group in enumerate(groups):
            yield (*groups[:number], (first, *group), *groups[number + 1 :])


def fit_together(
    device: Device, layouts: Sequence[Sequence[RoleLayout]]
) -> tuple[RoleLayout, ...] | None:
    """Choose a layout for every role so that a GPU has room for all; None if none is found.

    Every role starts with its fastest layout. While the layouts do not fit together, the one whose
    replacement saves the most bytes per second of extra time is replaced.
    """

    def missing(chosen: Sequence[RoleLayout]) -> float:
        roles = [replace(layout.memory, pool="") for layout in chosen]
        usable = usable_bytes(roles, "cuda", device.bytes)
        return max(pool_bytes(roles)[""] - usable, 0.0)

    if not all(layouts):
        return None
    chosen = [min(choices, key=lambda layout: layout.total) for choices in layouts]
    while bytes_missing := missing(chosen):
        best, best_rate = None, 0.0
        for number, choices in enumerate(layouts):
            for layout in choices:
                changed = [*chosen[:number], layout, *chosen[number + 1 :]]
                seconds = max(layout.total - chosen[number].total, 1e-6)
                rate = (bytes_missing - missing(changed)) / seconds
                if rate > best_rate:
                    best, best_rate = changed, rate
        if best is None:
            return None
        chosen = best
    return tuple(chosen)


LayOut = Callable[[tuple[str, ...], int], PoolLayout | None]
"""Lays roles out on a pool of a given size; None if they do not fit."""


def allocate(
    groups: Sequence[tuple[str, ...]],
    sizes: Sequence[int],
    num_gpus: int,
    lay_out: LayOut,
    least: Seconds = (),
) -> PlannedPlacement | None:
    """Return the fastest pools for these groups, with GPUs roughly in proportion to their work.

    A pool gets half to four times its share of the GPUs. If it fits on none of these numbers, it
    gets the fewest GPUs that it fits on. Return None if nothing fits.
    """
    laid_out = [[lay_out(group, n) for n in sizes] for group in groups]
    rooms = [[pool for pool in pools if pool is not None] for pools in laid_out]
    if not all(rooms):
        return None
    work = [sum(room[-1].seconds) * room[-1].gpus for room in rooms]
    tried = []
    for room, seconds in zip(rooms, work, strict=True):
        share = num_gpus * seconds / max(sum(work), 1e-9)
        tried.append([p for p in room if share / 2 <= p.gpus <= 4 * share] or room[:1])
    placements = (PlannedPlacement(pools, least) for pools in product(*tried))
    fitting = (placement for placement in placements if placement.gpus <= num_gpus)
    return min(fitting, key=PlannedPlacement.by_speed, default=None)
