"""Run the sides of a benchmark in processes, to their end or for one window of steps at a time.

    sides = {name: PausedSide(name, folder, None, options) for name in names}
    sides[name].begin()
    facts = sides[name].end()           # for one window; the other sides pause
    sides[name].close()

Sides are those of `async_side.py`, or of any other script that prints JSON.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from async_side import NUM_SAMPLES
from sides import ENV, HERE

SIDE = str(HERE / "async_side.py")
SETTLE = 5
"""Steps at the beginning of a window that do not count."""
WITHOUT_END = 10**6
"""Number of steps for a run that is stopped from outside."""
Facts = dict[str, list[float]]
Ticks = tuple[int, int]
"""Clock ticks of all cores since boot: (used by other virtual machines, total)."""


def start(
    *arguments: str, script: str = SIDE, stdin: int | None = None, cluster: str | None = None
) -> subprocess.Popen[str]:
    """Start a side in a new process; on Ray, in the `cluster` with this address or in a new one."""
    env = ENV | {"PYTHONPATH": str(HERE.parent)}
    if cluster is not None:
        env |= {"RAY_ADDRESS": cluster, "RAY_AUTH_MODE": "token"}
    command = [sys.executable, script, *arguments]
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True, env=env)


def answer(process: subprocess.Popen[str]) -> Any:
    """Wait until a side ends; return what it printed."""
    try:
        printed, _ = process.communicate(timeout=600)
    except subprocess.TimeoutExpired:
        process.kill()
        sys.exit(f"{process.args} has not ended in 600 s: is the machine busy?")
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        sys.exit(f"{process.args} failed: its error is above.")
    return json.loads(lines[-1])


class PausedSide:
    """A side that runs a window of steps on request, and pauses in between."""

    def __init__(
        self, name: str, folder: str, cluster: str | None, options: argparse.Namespace
    ) -> None:
        """Start the side, in this Ray cluster or on the local backend; it pauses after a window."""
        sizes = map(str, (WITHOUT_END, options.prompts, SETTLE + options.window))
        backend = "local" if cluster is None else "ray"
        self._process = start(name, folder, backend, *sizes, stdin=subprocess.PIPE, cluster=cluster)
        self._name, self._num_samples = name, options.prompts * NUM_SAMPLES
        self._num_asked = 1

    def begin(self, windows: int = 1) -> None:
        """Start one window, or several without a pause."""
        assert self._process.stdin is not None, "it was started with a pipe"
        self._process.stdin.write("\n" * windows)
        self._process.stdin.flush()
        self._num_asked += windows

    def end(self) -> Facts:
        """Return the measurements of the requested windows, without the steps that do not count."""
        assert self._process.stdout is not None, "it was started with a pipe"
        facts: Facts = defaultdict(list)
        while self._num_asked:
            line = self._process.stdout.readline()
            if not line:
                sys.exit(f"{self._name} failed: its error is above.")
            if line.startswith("{"):
                self._num_asked -= 1
                for key, values in json.loads(line).items():
                    facts[key] += values
        return {key: values[SETTLE - 1 :] for key, values in facts.items()}

    def rate(self, ended: list[float]) -> float:
        """Return the samples per second between the first and the last of these ends of steps."""
        return self._num_samples * (len(ended) - 1) / (ended[-1] - ended[0])

    def close(self) -> None:
        """End the side, which is pausing."""
        self._process.communicate()


@contextmanager
def cluster_for_all() -> Iterator[str]:
    """Context with one Ray cluster; yields its address.

    Each idle cluster uses a twentieth of a core, which would slow sides that use both cores, but
    not sides that use one.
    """
    process = start("cluster", stdin=subprocess.PIPE)
    assert process.stdout is not None, "it was started with a pipe"
    answered = (line for line in process.stdout if line.startswith("{"))
    answer_of_cluster = next(answered, None)
    if answer_of_cluster is None:
        sys.exit("no Ray cluster started: its error is above.")
    yield json.loads(answer_of_cluster)["address"]
    process.communicate()


def core_ticks() -> Ticks:
    """Return the current ticks."""
    first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0]
    ticks = [int(word) for word in first.split()[1:9]]
    return ticks[7], sum(ticks)


def share_stolen(since: Ticks) -> float:
    """Return the fraction of the cores' time since then that other virtual machines used."""
    stolen, of_all = (now - then for now, then in zip(core_ticks(), since, strict=True))
    return stolen / of_all
