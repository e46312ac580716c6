"""What the system says of a process."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

from verl_like.process.machine import process_state


def test_a_process_sleeps_is_stopped_ends_and_is_gone(tmp_path: Path) -> None:
    program = tmp_path / "odd) R (name"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "60"]) as process:
        await_state(process.pid, "S")
        process.send_signal(signal.SIGSTOP)
        await_state(process.pid, "T")
        process.kill()
        await_state(process.pid, "Z")
    assert process_state(process.pid) is None


def test_this_process_runs() -> None:
    assert process_state(os.getpid()) == "R"


def await_state(pid: int, state: str) -> None:
    end = time.monotonic() + 10
    while process_state(pid) != state:
        assert time.monotonic() < end, process_state(pid)
        time.sleep(0.01)
