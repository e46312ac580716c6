"""Partitions of roles, GPUs in proportion to work, and layouts that fit together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from trainer.tools.planner.cost import DEVICES
from trainer.tools.planner.search import (
    PlannedPlacement,
    PoolLayout,
    RoleLayout,
    allocate,
    fit_together,
    partitions,
)
from workers.memory import GIB, RoleMemory

H100 = DEVICES["H100"]
USABLE = 0.92 * 79
"""GiB of an H100 that a plan may fill."""


def layout(role: str, seconds: tuple[float, ...], kept: float = 0, call: float = 0) -> RoleLayout:
    memory = RoleMemory(role, "", "", weights=kept * GIB, activations=call * GIB)
    return RoleLayout(role, seconds, memory)


def pools(
    work: dict[str, tuple[float, ...]], fewest: dict[str, int]
) -> Callable[[tuple[str, ...], int], PoolLayout | None]:
    """Return pools whose seconds are the work of their roles divided by their GPUs."""

    def lay_out(roles: tuple[str, ...], num_gpus: int) -> PoolLayout | None:
        if any(num_gpus < fewest.get(role, 1) for role in roles):
            return None
        layouts = [layout(role, tuple(w / num_gpus for w in work[role])) for role in roles]
        return PoolLayout(num_gpus, tuple(layouts))

    return lay_out


def test_four_roles_have_fifteen_partitions() -> None:
    ways = {frozenset(map(frozenset, groups)) for groups in partitions("abcd")}
    assert len(ways) == len(list(partitions("abcd"))) == 15


def test_roles_on_a_pool_take_turns_and_pools_run_concurrently() -> None:
    first, second = layout("a", (1.0, 2.0), 10, 30), layout("b", (3.0, 0.5), 20, 40)
    together = PlannedPlacement((PoolLayout(4, (first, second)),))
    assert together.seconds == (4.0, 2.5)
    assert together.pools[0].bytes == 70 * GIB
    apart = PlannedPlacement((PoolLayout(2, (first,)), PoolLayout(2, (second,))), least=(0.0, 2.5))
    assert (apart.seconds, apart.step, apart.gpus) == ((3.0, 2.5), 5.5, 4)
    assert replace(together.pools[0], saved=(0.5, 0.0)).seconds == (3.5, 2.5)


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        ({"a": (1.0, 0.0), "b": (1.0, 0.0)}, [4, 4]),
        ({"a": (8.0, 0.0), "b": (1.0, 0.0)}, [4, 2]),  # b waits for a even on one more than half
        ({"a": (3.0, 1.0), "b": (0.0, 1.0), "c": (3.0, 1.0)}, [2, 2, 2]),
    ],
)
def test_gpus_follow_the_work(work: dict[str, tuple[float, ...]], expected: list[int]) -> None:
    groups = [(role,) for role in work]
    placement = allocate(groups, [1, 2, 4, 8], 8, pools(work, {}))
    assert placement is not None
    sizes = [pool.gpus for pool in placement.pools]
    assert sum(sizes) <= 8
    assert sizes[0] == expected[0]
    assert placement.step <= sum(
        max(w[stage] / size for w, size in zip(work.values(), expected, strict=True))
        for stage in range(2)
    )


def test_a_pool_has_enough_gpus_to_fit() -> None:
    work = {"large": (1.0,), "small": (9.0,)}
    placement = allocate([("large",), ("small",)], [1, 2, 4, 8], 8, pools(work, {"large": 4}))
    assert placement is not None
    assert [pool.gpus for pool in placement.pools] == [4, 4]
    assert allocate([("large",), ("small",)], [1, 2, 4], 4, pools(work, {"large": 4})) is None
    assert allocate([("large",)], [1, 2], 2, pools(work, {"large": 4})) is None


def test_equally_fast_placements_take_fewer_gpus() -> None:
    idle = {"a": (8.0, 0.0), "b": (0.0, 0.0)}
    placement = allocate([("a",), ("b",)], [1, 2, 4], 8, pools(idle, {}))
    assert placement is not None
    assert [pool.gpus for pool in placement.pools] == [4, 1]


def test_layouts_change_where_a_second_saves_most_bytes() -> None:
    fast, slow = layout("a", (1.0,), 40, 20), layout("a", (2.0,), 20, 20)
    other, cheaper = layout("b", (1.0,), 20, 10), layout("b", (1.1,), 10, 10)
    assert fit_together(H100, [[slow, fast], [cheaper]]) == (fast, cheaper)  # 70 GiB
    chosen = fit_together(H100, [[fast, slow], [other, cheaper]])  # 80 GiB, then 70
    assert chosen == (fast, cheaper)
    assert fit_together(H100, [[fast], [other]]) is None
    assert fit_together(H100, [[fast], []]) is None


def test_a_reserve_stays_free() -> None:
    below, above = layout("a", (1.0,), USABLE - 0.1), layout("a", (1.0,), USABLE + 0.1)
    assert fit_together(H100, [[below]]) == (below,)
    assert fit_together(H100, [[above]]) is None
