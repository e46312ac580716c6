"""Example scripts forward signals to their run, which stops with a checkpoint and resumes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import load
from tests.examples.scripts import EXAMPLES, ROOT

RUN = """
import signal, sys, time
def stop(number, _):
    print("stopped by", number, flush=True)
    time.sleep(0.1)
    sys.exit(128 + number)
for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(each, stop)
print("runs", signal.getsignal(signal.SIGINT) is signal.default_int_handler, flush=True)
time.sleep(60)
"""
SCRIPT = """
set -euo pipefail
source examples/stoppable.sh
code=0
stoppable "$@" || code=$?
echo "ended with $code"
stoppable false || echo "then with $?"
"""
WATCH = ("examples/quickstart/watch.py", sys.executable)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
@pytest.mark.parametrize("watched", [(), WATCH], ids=["alone", "watched"])
def test_a_script_forwards_a_signal_and_continues(watched: tuple[str, ...], number: int) -> None:
    with subprocess.Popen(
        ["bash", "-c", SCRIPT, "script", sys.executable, *watched, "-c", RUN],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # nohup's children ignore SIGHUP
    ) as script:  # fmt: skip
        assert script.stdout is not None
        assert script.stdout.readline() == "runs True\n", "Ctrl-C would reach it"
        script.send_signal(number)
        lines = script.stdout.read().splitlines()
    assert lines[0] == f"stopped by {number}"
    assert [line for line in lines if "with" in line] == [
        f"ended with {128 + number}",
        "then with 1",
    ]
    assert script.returncode == 0


@pytest.mark.long
@pytest.mark.example
def test_a_terminated_example_saves_its_run(tmp_path: Path, forked_python: Path) -> None:
    script = subprocess.Popen(
        ["bash", EXAMPLES / "remote_reward" / "run.sh", "trainer.total_training_steps=1000"],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"RUN_DIR": str(tmp_path), "PYTHON": str(forked_python)},
    )  # fmt: skip
    metrics, deadline = tmp_path / "remote" / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.stat().st_size) and script.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    started = set(load("examples/quickstart/watch.py").descendants(script.pid))

    script.terminate()
    output = script.communicate()[1]
    assert script.returncode == 143, output
    assert "Stopped by SIGTERM after step" in output
    assert list((tmp_path / "remote").glob("global_step_*/commit.json"))
    assert [pid for pid in started if Path(f"/proc/{pid}").exists()] == []
