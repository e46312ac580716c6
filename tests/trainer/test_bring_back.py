"""What a run that has lost groups goes on from: the step's beginning where every state is known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer import recovery
from trainer.recovery import ReplaceableRoles, bring_back
from trainer.run_folder.step_start import SavedReplicas, StepStart
from verl_like.errors import PlacementError, WorkerDiedError

START = StepStart.after(4, {"global_step": 4})
ROLES = ReplaceableRoles(
    roles=frozenset({"rollout"}),
    replicas={"actor": [[0], [1]]},
    generating=frozenset({"rollout"}),
)


class Rollout:
    """A group that notes that it was told to stop."""

    def __init__(self, notes: list[str]) -> None:
        self.notes, self.abort = notes, self

    def remote(self) -> Rollout:
        self.notes.append("abort")
        return self

    def get(self, timeout: float | None = None) -> None:
        raise WorkerDiedError("one of its ranks is gone, too")


class Groups(dict[str, Any]):
    """Instead of a run's groups: actor and rollout apart, perhaps a verifier with the actor."""

    def __init__(self, lost: list[str], changed: set[str], *beside: str) -> None:
        self.notes: list[str] = []
        super().__init__(rollout=Rollout(self.notes))
        self.lost, self.changed = lost, changed
        self.pools = {"train_pool": ["actor", *beside], "rollout_pool": ["rollout"]}

    def lost_pools(self, seconds: float) -> dict[str, str]:
        self.notes.append("lost?")
        return dict.fromkeys(self.lost, "gone")

    def roles_of_pools(self) -> dict[str, list[str]]:
        return self.pools

    def pools_by_processes(self) -> list[list[str]]:
        return [[pool] for pool in self.pools]

    def changed_roles(self) -> set[str]:
        return self.changed

    def restart(self, pool: str) -> None:
        self.notes.append(f"restart {pool}")

    def construct_again(self, pool: str) -> None:
        self.notes.append(f"construct {pool}")


class Unstartable(Groups):
    """Its node is full."""

    def restart(self, pool: str) -> None:
        raise PlacementError("no room")


class AtOnce:
    """Instead of a run's restarts: there is room, or there never is."""

    def when_there_is_room(self, start: Callable[[], None], since: float) -> None:
        start()


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SavedReplicas:
    """What ranks that live write, whoever asks them."""
    found = SavedReplicas(tmp_path / "replicas", {"actor": [1]})
    found.folder.mkdir()
    monkeypatch.setattr(recovery, "save_replicas", lambda *_: found)
    return found


def brought_back(groups: Any) -> Any:
    return bring_back(groups, ROLES, START, AtOnce(), 0.0)


@pytest.mark.parametrize("lost", [["train_pool"], ["train_pool", "rollout_pool"]])
def test_the_step_begins_anew_with_what_living_ranks_hold(
    saved: SavedReplicas, lost: list[str]
) -> None:
    groups = Groups(lost, {"rollout"})
    start = brought_back(groups).step_start
    assert (start.last_step, start.replicas) == (4, saved)
    assert groups.notes == ["abort", "lost?", *(f"restart {pool}" for pool in lost)]


def test_a_lost_rollout_needs_no_other_ranks_state(saved: SavedReplicas) -> None:
    assert brought_back(Groups(["rollout_pool"], {"rollout"})).step_start == START


@pytest.mark.parametrize(
    ("changed", "beside"),
    [({"actor"}, ()), (set(), ("verifier",))],
    ids=["it has begun to learn", "no other rank holds what the verifier does"],
)
def test_otherwise_all_that_learn_go_back_to_the_checkpoint(
    saved: SavedReplicas, changed: set[str], beside: tuple[str, ...]
) -> None:
    assert brought_back(Groups(["train_pool"], changed, *beside)).step_start is None
    assert brought_back(Groups(["train_pool", "rollout_pool"], changed, *beside)) is None


def test_what_was_written_goes_where_no_process_comes_to_load_it(saved: SavedReplicas) -> None:
    assert brought_back(Unstartable(["train_pool"], set())) is None
    assert not saved.folder.exists()
