"""A run that has lost groups keeps the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainer.restarts import restart_groups
from verl_like.errors import PlacementError

ROLLOUT = frozenset({"rollout"})


class Groups:
    """Replaces a run's groups: actor, critic and rollout apart, or as `pools` says."""

    def __init__(self, lost: list[str], **pools: list[str]) -> None:
        self.notes: list[str] = []
        self.lost = lost
        self.pools = pools or {"actor": ["actor"], "critic": ["critic"], "rollout": ["rollout"]}

    def lost_pools(self, seconds: float) -> dict[str, str]:
        return dict.fromkeys(self.lost, "gone")

    def roles_of_pools(self) -> dict[str, list[str]]:
        return self.pools

    def pools_by_processes(self) -> list[list[str]]:
        return [[pool] for pool in self.pools]

    def restart(self, pool: str) -> None:
        self.notes.append(f"restart {pool}")

    def construct_again(self, pool: str) -> None:
        self.notes.append(f"construct {pool}")


class Unstartable(Groups):
    """Its node is full."""

    def restart(self, pool: str) -> None:
        raise PlacementError("no room")


class AtOnce:
    """Replaces a run's restarts: there is always room."""

    def wait_for_capacity(self, start: Callable[[], None], since: float) -> None:
        start()


def brought_back(groups: Any) -> bool:
    return restart_groups(groups, ROLLOUT, AtOnce(), 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lost", "made"),
    [
        (["actor"], ["restart actor", "construct critic"]),
        (["actor", "critic"], ["restart actor", "restart critic"]),
        (["rollout"], ["restart rollout", "construct actor", "construct critic"]),
    ],
)
def test_stateless_roles_stay(lost: list[str], made: list[str]) -> None:
    groups = Groups(lost)
    assert brought_back(groups)
    assert groups.notes == made


def test_a_rollout_beside_an_actor_goes_with_its_process() -> None:
    groups = Groups(["critic"], train=["actor", "rollout"], critic=["critic"])
    assert brought_back(groups)
    assert groups.notes == ["restart critic", "restart train"]


@pytest.mark.parametrize(
    "groups",
    [Groups([]), Groups(["actor", "critic", "rollout"]), Unstartable(["actor"])],
    ids=["nothing is lost", "all are lost", "what is lost cannot be started"],
)
def test_otherwise_none_is_kept(groups: Groups) -> None:
    assert not brought_back(groups)
