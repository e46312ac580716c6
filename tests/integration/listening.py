"""List the sockets on which the processes of a run on Ray listen; run by `test_sockets.py`.

    python -m tests.integration.listening        prints the list

This process starts its own cluster, so only the run has sockets here.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.forked_ray import ask_for_forks
from tests.programs import tell
from tests.sockets import ALL_INTERFACES, listeners
from tests.verl_like.groups import start
from verl_like import Dispatch, Worker, register
from verl_like.backends.ray import connect
from verl_like.process.family import descendants
from workers.weights.transfer import WeightSender


class Meeting(WeightSender, Worker):
    """Opens all sockets that a role opens."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meet(self) -> int:
        self.open_process_group()
        return os.getpid()


def kind_of(address: str) -> str:
    """Return the kind of address, as `docs/security.md` names it."""
    if address in ALL_INTERFACES:
        return "all"
    return "loopback" if address.startswith("127.") or address == "::1" else "node"


def name_of(pid: int, workers: list[int]) -> str:
    """Return a process's name in `docs/security.md`; for an unknown one, its command."""
    if pid in workers:
        return "worker"
    if pid == os.getpid():
        return "driver"
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
    known = ("gcs_server", "raylet/raylet", "DashboardAgent", "RuntimeEnv")
    names = {"raylet/raylet": "raylet", "RuntimeEnv": "RuntimeEnvAgent"}
    return next((names.get(part, part) for part in known if part in command), command)


def main() -> list[tuple[str, str]]:
    """Print process and kind of address of every socket."""
    connect()
    with start("ray", {"actor": (Meeting, ())}, [2]) as group:
        workers = group.meet()
        group.open_weight_channel()
        # workers may be forks of a server that is nobody's child here, and some idle
        ours = {os.getpid(), *descendants(os.getpid()), *workers}
        found = {(name_of(pid, workers), kind_of(a)) for a, _, pid in listeners(ours)}
    return sorted(each for each in found if not each[0].startswith("ray::IDLE"))


if __name__ == "__main__":
    ask_for_forks(pytest.MonkeyPatch())
    tell({"found": main()})
