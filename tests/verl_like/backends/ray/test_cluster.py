"""A Ray cluster of this machine is private to its user; a lost head or node is noticed soon."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from verl_like.backends.ray import cluster
from verl_like.backends.ray.cluster import private_folder
from verl_like.errors import WorkerError

DEATHS_S = 5.0
"""A death may take this long to be known."""
SLICE_S = 1.1
"""A driver that waits asks about once a second."""


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def at_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """The functions that the process would call at its end; homes and files are in `tmp_path`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(cluster, "LONGEST_PATH", 1000)
    for name in cluster.TOKEN_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    calls: list[Callable[[], None]] = []
    monkeypatch.setattr(
        cluster.atexit, "register", lambda call, *args: calls.append(partial(call, *args))
    )
    return calls


def test_the_session_folder_is_private_and_removed_at_exit(
    at_exit: list[Callable[[], None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = cluster._session_folder()
    assert folder.parent == private_folder(str(tmp_path))
    assert mode(folder.parent) == 0o700
    (remove,) = at_exit
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: -1)
    remove()
    assert folder.exists(), "it belongs to another process"
    monkeypatch.setattr(os, "getpid", lambda: pid)
    remove()
    assert not folder.exists()


def test_socket_paths_fit_with_the_longest_folder_and_pid() -> None:
    of_ray = "session_2026-11-24_14-54-19_381012_4194304/sockets/plasma_store"
    assert len(f"{'x' * cluster.LONGEST_PATH}/ray-4194304-qabpbtls/{of_ray}") <= 107


@pytest.mark.usefixtures("at_exit")
def test_folders_of_killed_runs_are_removed_and_those_in_use_stay(tmp_path: Path) -> None:
    private = private_folder(str(tmp_path))
    left, used = private / "ray-4194999-abc", private / f"ray-{os.getpid()}-abc"
    left.mkdir()
    used.mkdir()
    cluster._session_folder()
    assert not left.exists()
    assert used.exists()


@pytest.mark.usefixtures("at_exit")
@pytest.mark.parametrize("is_there", [False, True])
def test_only_its_user_can_read_the_token(tmp_path: Path, is_there: bool) -> None:
    token = tmp_path / ".ray" / "auth_token"
    if is_there:
        token.parent.mkdir()
        token.write_text("as it was")
        token.chmod(0o644)
    cluster._guard_token()
    assert mode(token) == 0o600
    assert (token.read_text() == "as it was") == is_there
    assert len(token.read_text()) == (9 if is_there else 64)


def test_a_folder_that_others_can_enter_is_rejected(tmp_path: Path) -> None:
    private_folder(str(tmp_path)).chmod(0o755)
    with pytest.raises(WorkerError, match="not private to this user"):
        private_folder(str(tmp_path))


def test_a_local_cluster_collects_metrics_only_for_a_dashboard(
    at_exit: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("RAY_enable_metrics_collection", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    seen: list[object] = []

    def init(**options: object) -> None:
        seen.append((options["include_dashboard"], os.environ.get("RAY_enable_metrics_collection")))

    monkeypatch.setattr(ray, "init", init)
    cluster.connect()
    cluster.connect(include_dashboard=True)
    assert seen == [(False, "0"), (True, None)]
    assert "RAY_enable_metrics_collection" not in os.environ


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        (None, RuntimeError("Timed out\nwaiting for file /gcs"), "Timed out wait.*backend=local"),
        (None, Exception("some of the raylet failed to startup."), "startup[)]. Run `ray start"),
        (None, OSError(28, "No space left on device"), r"No space left.*/dev/shm has [0-9.]+ GiB"),
        ("nonsense", ValueError("Invalid address format"), "cluster at nonsense .*RAY_ADDRESS"),
        ("ray://10.0.0.1:1", ConnectionError("timeout"), "unset both to start a new cluster"),
    ],
)
def test_a_cluster_that_cannot_start_says_what_to_do_in_one_line(
    address: str | None,
    error: Exception,
    message: str,
    at_exit: list[Callable[[], None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)

    def init(**options: object) -> None:
        raise error

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(WorkerError, match=message) as caught:
        cluster.connect(address)
    assert "\n" not in str(caught.value)
    assert caught.value.__suppress_context__, "the traceback of Ray is shown"


def test_a_folder_that_cannot_be_created_is_named() -> None:
    with pytest.raises(WorkerError, match="/proc/no/verl-like.*Set RAY_TMPDIR to a folder"):
        private_folder("/proc/no")


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A simulated clock, and whether a listener answers."""
    now = SimpleNamespace(seconds=1000.0, listens=False)
    context = SimpleNamespace(gcs_address="192.0.2.1:6379")
    node = {"NodeID": "n" * 56, "NodeManagerAddress": "192.0.2.2", "NodeManagerPort": 7000}
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "nodes", lambda: [node])
    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    monkeypatch.setattr(cluster, "_answers", lambda place: now.listens)
    return now


def of_the_head() -> Callable[[], str | None]:
    return cluster.ClusterProbe().head_failure


def of_a_node() -> Callable[[], str | None]:
    probe = cluster.ClusterProbe()
    return lambda: probe.node_failure("n" * 56)


@pytest.mark.parametrize("probed", [of_the_head, of_a_node])
def test_a_silent_head_or_node_counts_as_gone_in_time(
    network: SimpleNamespace, probed: Callable[[], Callable[[], str | None]]
) -> None:
    node_failure_cause, began = probed(), network.seconds
    while (why := node_failure_cause()) is None:
        network.seconds += SLICE_S
        assert network.seconds - began <= DEATHS_S - SLICE_S, "it may have died after a look"
    assert "is gone" in why


@pytest.mark.parametrize("probed", [of_the_head, of_a_node])
def test_a_head_or_node_that_listens_again_is_not_gone(
    network: SimpleNamespace, probed: Callable[[], Callable[[], str | None]]
) -> None:
    node_failure_cause = probed()
    for listens in (False, False, True, False, False):
        network.listens = listens
        assert node_failure_cause() is None
        network.seconds += SLICE_S
