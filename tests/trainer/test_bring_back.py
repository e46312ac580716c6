"""A run that has lost groups keeps the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainer.restarts import restart_groups
from verl_like.errors import PlacementError

ROLLOUT = frozenset({"rollout"})


class Groups:
    """Stand-in for a run's groups: actor, critic and rollout in their own pools, or in `pools`."""

    def __init__(self, lost: list[str], **pools: list[str]) -> None:
        self.calls: list[str] = []
        self.lost = lost
        self.pools = pools or {"actor": ["actor"], "critic": ["critic"], "rollout": ["rollout"]}

    def lost_pools(self, seconds: float) -> dict[str, str]:
        return dict.fromkeys(self.lost, "gone")

    def roles_of_pools(self) -> dict[str, list[str]]:
        return self.pools

    def pools_by_processes(self) -> list[list[str]]:
        return [[pool] for pool in self.pools]

    def restart(self, pool: str) -> None:
        self.calls.append(f"restart {pool}")

    def construct_again(self, pool: str) -> None:
        self.calls.append(f"construct {pool}")


class Unstartable(Groups):
    """Its node is full."""

    def restart(self, pool: str) -> None:
        raise PlacementError("no room")


class AtOnce:
    """Stand-in for a run's restarts: there is always room."""

    def wait_for_capacity(self, start: Callable[[], None], since: float) -> None:
        start()


def restarted(groups: Any) -> bool:
    return restart_groups(groups, ROLLOUT, AtOnce(), 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("groups", "calls"),
    [
        (Groups(["actor"]), ["restart actor", "construct critic"]),
        (Groups(["actor", "critic"]), ["restart actor", "restart critic"]),
        (Groups(["rollout"]), ["restart rollout", "construct actor", "construct critic"]),
        (
            Groups(["critic"], train=["actor", "rollout"], critic=["critic"]),
            ["restart critic", "restart train"],
        ),
    ],
    ids=["actor", "actor and critic", "rollout", "critic, with a rollout in the actor's process"],
)
def test_a_lost_group_restarts_or_constructs_roles_with_state(
    groups: Groups, calls: list[str]
) -> None:
    assert restarted(groups)
    assert groups.calls == calls


@pytest.mark.parametrize(
    "groups",
    [Groups([]), Groups(["actor", "critic", "rollout"]), Unstartable(["actor"])],
    ids=["nothing is lost", "all are lost", "the lost group cannot start"],
)
def test_no_group_is_kept_in_other_cases(groups: Groups) -> None:
    assert not restarted(groups)
