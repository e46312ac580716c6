"""What a run listens on is what `docs/security.md` says."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests import ROOT
from tests.sockets import ALL_INTERFACES, listeners
from tests.verl_like.groups import start
from verl_like import Dispatch, Worker, register
from verl_like.process.machine import descendants
from workers.weights.sync import WeightSender


class Meeting(WeightSender, Worker):
    """Opens all that a role opens."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def meet(self) -> int:
        self.open_process_group()
        return os.getpid()


def documented() -> set[tuple[str, str]]:
    """(process, kind of address) of the table's rows."""
    lines = (ROOT / "docs/security.md").read_text(encoding="utf-8").splitlines()
    start = lines.index("| Process | Address | For | Who may |") + 2
    rows = set()
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        process, addresses = (cell.strip() for cell in line.split("|")[1:3])
        rows |= {(process, address) for address in addresses.split(", ")}
    return rows


def kind_of(address: str) -> str:
    if address in ALL_INTERFACES:
        return "all"
    return "loopback" if address.startswith("127.") or address == "::1" else "node"


def name_of(pid: int, workers: list[int]) -> str:
    if pid in workers:
        return "worker"
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
    known = ("gcs_server", "raylet/raylet", "DashboardAgent", "RuntimeEnv")
    names = {"raylet/raylet": "raylet", "RuntimeEnv": "RuntimeEnvAgent"}
    return next((names.get(part, part) for part in known if part in command), command)


@pytest.mark.ray
def test_a_run_on_ray_listens_on_what_the_docs_list(ray_session: None) -> None:
    with start("ray", {"actor": (Meeting, ())}, [2]) as group:
        workers = group.meet()
        group.open_weight_channel()
        # tests have sockets of their own in this process, the driver, and workers that idle;
        # workers may be forks of a server that is nobody's child here
        ours = {*descendants(os.getpid()), *workers}
        found = {(name_of(pid, workers), kind_of(a)) for a, _, pid in listeners(ours)}
        found = {(name, kind) for name, kind in found if not name.startswith("ray::IDLE")}
    assert found >= {("worker", "loopback"), ("worker", "all"), ("gcs_server", "all")}
    agent = {("DashboardAgent", "node"), ("DashboardAgent", "loopback")}  # with ray[default] alone
    assert found | agent | {("driver", "all")} == documented()


def test_without_ray_all_is_on_loopback() -> None:
    with start("child", {"actor": (Meeting, ())}, [2]) as group:
        workers = group.meet()
        address = group.open_weight_channel()[0]
        found = listeners(workers)
    assert len(found) >= 4
    assert {kind_of(host) for host, _, _ in found} == {"loopback"}
    assert int(address.split("/")[0].split(":")[1]) in {port for _, port, _ in found}


@pytest.mark.ray
def test_the_session_of_ray_and_its_token_are_the_users_alone(ray_session: None) -> None:
    import ray

    session = Path(ray._private.worker._global_node.get_session_dir_path())
    private = session.parent.parent
    assert private.name == f"verl-like-{os.getuid()}"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    token = Path.home() / ".ray" / "auth_token"
    assert not token.exists() or stat.S_IMODE(token.stat().st_mode) == 0o600
