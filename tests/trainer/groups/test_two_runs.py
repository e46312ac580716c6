"""Two runs on one host at the same time: neither takes the other's ports or needs a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import ROOT
from tests.trainer.groups.reporting_role import reporting
from tests.trainer.groups.two_runs import ROLES
from trainer.groups.worker_groups import WorkerGroups

LISTENS = "0A"


def listening(pids: list[int]) -> set[str]:
    """Return the addresses at which these processes listen, as /proc writes them."""
    sockets = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(entry))
            except FileNotFoundError:
                continue
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and f"socket:[{words[9]}]" in sockets:
                addresses.add(words[1])
    return addresses


def test_two_runs_at_once_use_different_ports_and_only_loopback(tmp_path: Path) -> None:
    def run(name: str) -> tuple[list[float], set[str]]:
        config = reporting(tmp_path / name, ROLES, generator_0_pool=1, trainer_pool=2)
        with WorkerGroups(config) as groups:
            sums = groups["actor"].sum_of_ranks()
            pids = [header.pid for r in ROLES for header in groups[r].transport.started]
            return sums, listening(pids)

    with ThreadPoolExecutor(2) as at_once:
        (first, ports), (second, other_ports) = at_once.map(run, ["first", "second"])
    assert first == second == [1.0, 1.0]
    assert len(ports) >= 1
    assert ports.isdisjoint(other_ports)
    assert {address.partition(":")[0] for address in ports | other_ports} == {"0100007F"}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.ray)])
def test_two_runs_at_once_need_no_network(backend: str, tmp_path: Path) -> None:
    without_network = ["unshare", "--net", "--map-root-user"]
    if not shutil.which("ip") or subprocess.run([*without_network, "true"], check=False).returncode:
        pytest.skip("this machine does not allow network namespaces")
    run = f"{sys.executable} -m tests.trainer.groups.two_runs {backend} {tmp_path}"
    both = f"ip link set lo up; {run}/first & {run}/second; wait"
    done = subprocess.run(
        [*without_network, "sh", "-c", both],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    sums = [line for line in done.stdout.splitlines() if line.startswith("sums")]
    assert sums == ["sums [1.0, 1.0] [0.0]"] * 2, done.stderr[-3000:]
