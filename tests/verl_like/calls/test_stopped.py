"""A process that is stopped is told from one that computes."""

from __future__ import annotations

import os
import signal
import subprocess

from tests.waiting import wait_until
from verl_like.calls.stopped import STOPPED_S, StoppedProcesses


def test_a_process_that_stays_stopped_is_given_up_and_one_that_goes_on_is_not() -> None:
    now = [0.0]
    stopped = StoppedProcesses(clock=lambda: now[0])
    with subprocess.Popen(["sleep", "60"]) as child:
        try:
            assert stopped.why_gone(child.pid) is None
            stop(child.pid)
            assert stopped.why_gone(child.pid) is None
            now[0] = STOPPED_S
            assert f"kill -CONT {child.pid}" in (stopped.why_gone(child.pid) or "")
            os.kill(child.pid, signal.SIGCONT)
            wait_until(lambda: stopped.why_gone(child.pid) is None)
            stop(child.pid)
            assert stopped.why_gone(child.pid) is None, "counted anew"
        finally:
            child.kill()
    assert stopped.why_gone(child.pid) is None, "it has ended"


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
