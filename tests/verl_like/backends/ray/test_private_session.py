"""A Ray cluster of one's own is nobody else's; nothing here starts Ray."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from verl_like.backends.ray import private_session as session
from verl_like.errors import WorkerError
from verl_like.process.private_folder import private_folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Homes and temporary files are in `tmp_path`; what the process would do at its end."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(session, "LONGEST_PATH", 1000)
    for name in (*session.TOKEN_PLACES, *session.WITHOUT_METRICS):
        monkeypatch.delenv(name, raising=False)
    calls: list[tuple] = []
    monkeypatch.setattr(session.atexit, "register", lambda *call: calls.append(call))
    return calls


def test_the_session_is_in_a_private_folder_and_goes_with_the_process(
    ended: list[tuple], tmp_path: Path
) -> None:
    with session.private_session(with_metrics=False) as options:
        folder = Path(options["_temp_dir"])
        assert os.environ["RAY_enable_metrics_collection"] == "0"
    assert "RAY_enable_metrics_collection" not in os.environ
    assert folder.parent == private_folder(str(tmp_path))
    assert mode(folder.parent) == 0o700
    (remove, *whose), (shut_down, _) = ended
    assert shut_down is session._shut_down  # the last that is registered runs first
    remove(folder, -1)
    assert folder.exists(), "of another process"
    remove(*whose)
    assert not folder.exists()


def test_with_the_longest_path_and_number_of_a_process_a_socket_has_a_path() -> None:
    of_ray = "session_2026-11-24_14-54-19_381012_4194304/sockets/plasma_store"
    assert len(f"{'x' * session.LONGEST_PATH}/ray-4194304-qabpbtls/{of_ray}") <= 107


def test_a_cluster_that_does_not_start_is_not_shut_down(ended: list[tuple]) -> None:
    starting = session.private_session(with_metrics=True)
    starting.__enter__()
    assert "RAY_enable_metrics_collection" not in os.environ
    error = TimeoutError()
    assert not starting.__exit__(TimeoutError, error, None)
    assert [call[0] for call in ended] == [session._remove]


def test_what_killed_runs_left_goes_and_what_living_ones_use_stays(
    ended: list[tuple], tmp_path: Path
) -> None:
    private = private_folder(str(tmp_path))
    left, used = private / "ray-4194999-abc", private / f"ray-{os.getpid()}-abc"
    left.mkdir()
    used.mkdir()
    session._session_folder()
    assert not left.exists()
    assert used.exists()


@pytest.mark.parametrize("is_there", [False, True])
def test_the_token_is_for_its_user_alone(
    ended: list[tuple], tmp_path: Path, is_there: bool
) -> None:
    token = tmp_path / ".ray" / "auth_token"
    if is_there:
        token.parent.mkdir()
        token.write_text("as it was")
        token.chmod(0o644)
    session._guard_token()
    assert mode(token) == 0o600
    assert (token.read_text() == "as it was") == is_there
    assert len(token.read_text()) == (9 if is_there else 64)


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    private_folder(str(tmp_path)).chmod(0o755)
    with pytest.raises(WorkerError, match="not a folder of this user alone"):
        private_folder(str(tmp_path))
