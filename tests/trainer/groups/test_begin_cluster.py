"""`trainer.groups.cluster.begin_cluster`: Ray starts during the other preparations of a run."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import overrides
from trainer import load_config
from trainer.groups import cluster


@pytest.fixture(autouse=True)
def no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def on_ray(tiny: Path, folder: Path, *more: str) -> Any:
    return load_config(overrides(tiny, folder, "trainer.backend=ray", *more))


def test_the_thread_that_starts_ray_ends_with_the_attempt(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_connect, is_connected = threading.Event(), threading.Event()

    def connect(config: Any, worker_code: Any) -> None:
        assert may_connect.wait(30)
        is_connected.set()

    monkeypatch.setattr(cluster, "_connect", connect)
    with ExitStack() as at_end:
        cluster.begin_cluster(on_ray(tiny_dir, tmp_path), at_end)
        assert not is_connected.is_set()
        may_connect.set()
    assert is_connected.is_set()


def test_a_start_that_fails_is_repeated_later(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(config: Any, worker_code: Any) -> None:
        raise OSError("no place for a socket")

    monkeypatch.setattr(cluster, "_connect", connect)
    config = on_ray(tiny_dir, tmp_path)
    with ExitStack() as at_end:
        cluster.begin_cluster(config, at_end)
    with pytest.raises(OSError, match="no place"):
        cluster.find_nodes(config, [])


@pytest.mark.parametrize(
    "setting", ["trainer.backend=local", "trainer.dry_run=true", "ray.address=head:6379"]
)
def test_a_run_without_its_own_cluster_starts_none(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(cluster, "_connect", lambda config, code: started.append(config))
    with ExitStack() as at_end:
        cluster.begin_cluster(on_ray(tiny_dir, tmp_path, setting), at_end)
    assert started == []
