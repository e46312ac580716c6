"""The state of a group that has lost ranks is written by those that live."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.verl_like.mortal_transport import NEVER, mortal_group
from trainer import replicas
from trainer.replicas import save_replicas
from verl_like import Dispatch, Worker, register
from verl_like.calls import answers
from verl_like.errors import CheckpointError

OF_FOUR = [[0, 1], [2, 3]]


class Learner(Worker):
    """Writes nothing, and says that it has."""

    def __init__(self, refusing: int | None = None) -> None:
        super().__init__()
        self.refusing = refusing

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, keeps_state=True)
    def save_replica(self, path: str, ranks: list[int]) -> dict[str, Any] | None:
        if self.rank == self.refusing:
            raise CheckpointError("the disk is full")
        if self.rank not in ranks:
            return None
        Path(path).mkdir(parents=True, exist_ok=True)
        return {"num_ranks": len(ranks), "files": {f"shards/{self.rank}": {}}}


class Groups(dict[str, Any]):
    """In the place of a run's groups."""

    def __init__(self, folder: Path, **groups: Any) -> None:
        super().__init__(groups)
        self.config = SimpleNamespace(trainer=SimpleNamespace(default_local_dir=str(folder)))


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "AFTER_DEATH_S", 0.0)
    monkeypatch.setattr(replicas, "LEAST_S", 0.1)


def save(folder: Path, group: Any) -> Any:
    groups: Any = Groups(folder, actor=group)
    return save_replicas(groups, ["actor"], {"actor": OF_FOUR}, time.monotonic())


@pytest.mark.parametrize(("dead", "ranks"), [(0, [2, 3]), (2, [0, 1])])
def test_the_first_replica_whose_ranks_all_live_writes_it(
    tmp_path: Path, dead: int, ranks: list[int]
) -> None:
    group = mortal_group(4, Learner)
    group.transport.dead = {dead: 0}
    saved = save(tmp_path, group)
    assert saved.ranks == {"actor": ranks}
    assert str(saved) == f"actor ranks {ranks[0]}, {ranks[1]}"
    manifest = json.loads((saved.folder / "actor" / "manifest.json").read_text())
    assert list(manifest["files"]) == [f"shards/{rank}" for rank in ranks]
    assert group.transport.changed_roles == set(), "whoever writes stays as it is"


@pytest.mark.parametrize(
    ("dead", "slow", "refusing", "why"),
    [
        ([0, 3], {}, None, "of role rank(s) 1, 2 live, and its whole state is on [0, 1] or [2, 3]"),
        ([0], {2: NEVER}, None, "did not finish within 0.1 s"),
        ([0], {}, 3, "the disk is full"),
    ],
)
def test_where_it_cannot_be_had_the_reason_is_said_and_no_file_is_left(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    dead: list[int],
    slow: dict[int, int],
    refusing: int | None,
    why: str,
) -> None:
    group = mortal_group(4, Learner, refusing)
    group.transport.dead, group.transport.slow = dict.fromkeys(dead, 0), slow
    with caplog.at_level("WARNING"):
        assert save(tmp_path, group) is None
    assert "the ranks that live cannot give the state of the lost group: " in caplog.text
    assert why in caplog.text
    assert list(tmp_path.iterdir()) == []
