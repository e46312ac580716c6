"""`trainer.groups.nodes.begin_cluster`: Ray starts during the other preparations of a run."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import overrides
from trainer import load_config
from trainer.groups import nodes


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations for which a cluster was requested."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    asked: list[Any] = []
    monkeypatch.setattr(nodes, "_connect", lambda config, code: asked.append(config))
    return asked


def test_it_begins_in_a_thread_which_has_ended_when_the_attempt_has(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    goes_on, is_there = threading.Event(), threading.Event()

    def connect(config: Any, worker_code: Any) -> None:
        assert goes_on.wait(30)
        is_there.set()

    monkeypatch.setattr(nodes, "_connect", connect)
    with ExitStack() as at_end:
        nodes.begin_cluster(
            load_config(overrides(tiny_dir, tmp_path, "trainer.backend=ray")), at_end
        )
        assert not is_there.is_set()
        goes_on.set()
    assert is_there.is_set()


def test_a_start_that_fails_is_left_to_be_tried_again(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def connect(config: Any, worker_code: Any) -> None:
        raise OSError("no place for a socket")

    monkeypatch.setattr(nodes, "_connect", connect)
    config = load_config(overrides(tiny_dir, tmp_path, "trainer.backend=ray"))
    with ExitStack() as at_end:
        nodes.begin_cluster(config, at_end)
    with pytest.raises(OSError, match="no place"):
        nodes.find_nodes(config, [])


@pytest.mark.parametrize(
    "setting", ["trainer.backend=local", "trainer.dry_run=true", "ray.address=head:6379"]
)
def test_what_has_no_cluster_of_its_own_begins_none(
    tiny_dir: Path, tmp_path: Path, started: list[Any], setting: str
) -> None:
    settings = ("trainer.backend=ray", setting)
    with ExitStack() as at_end:
        nodes.begin_cluster(load_config(overrides(tiny_dir, tmp_path, *settings)), at_end)
    assert started == []
