"""Signals keep their handlers after Ray has ended during a run."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, time
from trainer.run_folder.signals import StopSignals
from verl_like.backends.ray import cluster

with StopSignals() as stop, stop.deferred():
    cluster.connect(num_cpus=1)
    cluster._leave()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.1)
    print("received", int(stop.received))
"""


@pytest.mark.ray
def test_a_run_is_still_asked_to_stop_after_it_has_left_a_cluster() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["received", "15"], done.stderr
