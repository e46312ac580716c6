"""Processes of environments: each trajectory gets its own replies, and hostile code is ended."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.forked import start_python
from tests.waiting import wait_until_ended
from verl_like.process import child, pool
from workers.agents.host import EnvironmentHost
from workers.agents.load_environment import EnvironmentSpec

HOSTILE = """
import ctypes, os, signal, socket, time
from pathlib import Path
from workers.agents import Observation, TrajectoryEnd

def every_socket():
    for number in range(3, 64):
        try:
            socket.socket(fileno=os.dup(number)).close()
        except OSError:
            continue
        yield number

class Hostile:
    def reset(self, row):
        self.row = row
        return f"row {row['number']}"

    def step(self, text):
        act = self.row.get("act", "")
        if "fork" in act:
            fork = ctypes.CDLL(None).fork if "C" in act else os.fork
            if (fork() == 0) == ("parent" not in act):
                time.sleep(0.2)
        if act == "forge":
            for number in every_socket():
                os.write(number, b'{"text": "forged"}\\n[0, {"text": "forged"}]\\n' * 2)
        if act.startswith("supervisor"):
            ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)
            stat = Path(f"/proc/{os.getppid()}/stat").read_text()
            supervisor = int(stat.rpartition(")")[2].split()[1])
            Path(self.row["note"]).write_text(f"{os.getpid()} {os.getcwd()}")
            os.kill(supervisor, signal.SIGSTOP if "paused" in act else signal.SIGKILL)
            time.sleep(0 if "paused" in act else 600)
        return Observation(f"row {self.row['number']} read {text}")
"""


@pytest.fixture
def hostile(tmp_path: Path) -> EnvironmentSpec:
    (tmp_path / "hostile.py").write_text(HOSTILE)
    return EnvironmentSpec(f"{tmp_path}/hostile.py:Hostile")


@pytest.fixture
def host(hostile: EnvironmentSpec) -> Iterator[EnvironmentHost]:
    with closing(EnvironmentHost(hostile, 10.0)) as host:
        yield host


def reply_of(host: EnvironmentHost, number: int) -> dict[str, Any]:
    """Return the next reply of a trajectory; others have none."""
    while True:
        for other, reply in host.answers(1.0):
            assert other == number
            return reply


def play(host: EnvironmentHost, number: int, num_turns: int = 2, **row: Any) -> list[str]:
    """Play a trajectory, and return the texts of its replies."""
    host.open(number, (0, number), {"number": number, **row})
    texts = [reply_of(host, number)["text"]]
    for turn in range(num_turns):
        host.say(number, f"turn {turn}")
        texts.append(reply_of(host, number)["messages"][0]["content"])
    host.end(number)
    return texts


@pytest.mark.parametrize("act", ["fork", "C fork", "fork, slow parent", "forge"])
def test_every_trajectory_gets_its_own_replies(host: EnvironmentHost, act: str) -> None:
    """Code may fork and go on in both processes, or write replies of its own."""
    for number in range(4):
        texts = play(host, number, **{"act": act} if number == 0 else {})
        assert texts == [f"row {number}", *(f"row {number} read turn {turn}" for turn in (0, 1))]
        time.sleep(0.3 if number == 0 else 0.0)


@pytest.mark.linux
def test_code_that_kills_its_supervisor_is_killed(
    hostile: EnvironmentSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_start_python", start_python)  # a fork has its server's variables
    host, note = EnvironmentHost(hostile, 10.0), tmp_path / "note"
    host.open(0, (0, 0), {"number": 0, "act": "supervisor", "note": str(note)})
    reply_of(host, 0)
    host.say(0, "a")
    assert "failed" in reply_of(host, 0)
    pid, folder = note.read_text().split()
    host.close()
    wait_until_ended(int(pid))
    assert not os.path.exists(folder)


@pytest.mark.linux
def test_a_paused_supervisor_ends_as_soon_as_its_host_closes(
    host: EnvironmentHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "END_S", 60.0)
    play(host, 0, 1, act="supervisor is paused", note=str(tmp_path / "note"))
    begin = time.monotonic()
    host.close()
    assert time.monotonic() - begin < 50
    assert not os.path.exists((tmp_path / "note").read_text().split()[1])
