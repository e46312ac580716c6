"""Run a command, and print the peak memory of it and all its descendants together.

    python watch.py COMMAND ...             runs COMMAND and exits with its exit code
    python watch.py --reached FOLDER GOAL   exits with 0 if the last step of the run in FOLDER
                                            has at least that mean reward

Memory that several processes share is counted once (proportional set size of Linux).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

INTERVAL_S = 3.0
"""Seconds between two measurements; each takes about 10 ms of CPU time per process."""


def descendants(root: int) -> list[int]:
    """Return `root` and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # the process ended meanwhile
                continue
            children.setdefault(parent, []).append(int(entry.name))
    processes = [root]
    for pid in processes:
        processes += children.get(pid, [])
    return processes


def memory_bytes(pid: int) -> int:
    """Return the memory of a process, with its part of shared memory; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def watch(command: list[str]) -> int:
    """Run `command` until it ends; forward signals to it, except Ctrl-C, which it gets anyway."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(
        command, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    )
    for forwarded in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(forwarded, lambda number, _: child.send_signal(number))
    peak, most = 0, 0
    while True:
        if Path("/proc/self/smaps_rollup").exists():
            sizes = [size for pid in descendants(child.pid) if (size := memory_bytes(pid))]
            peak, most = max((peak, most), (sum(sizes), len(sizes)))
        try:
            code = child.wait(INTERVAL_S)
            break
        except subprocess.TimeoutExpired:
            continue
    if peak:
        print(f"peak memory of all {most} processes together: {peak / 1e9:.2f} GB", flush=True)
    return code if code >= 0 else 128 - code


def has_reached(folder: Path, goal: float) -> bool:
    """Return True if the last step in `metrics.jsonl` has a mean reward of at least `goal`."""
    try:
        last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    except (OSError, IndexError, ValueError):
        return False
    return bool(last.get("critic/score/mean", 0.0) >= goal)


if __name__ == "__main__":
    if sys.argv[1] == "--reached":
        sys.exit(not has_reached(Path(sys.argv[2]), float(sys.argv[3])))
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(watch(sys.argv[1:]))
