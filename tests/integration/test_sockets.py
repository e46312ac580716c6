"""A run listens only on the sockets in `docs/security.md`."""

from __future__ import annotations

import os
import stat
from itertools import product
from pathlib import Path

import pytest

from tests import ROOT
from tests.integration.listening import Meeting, kind_of
from tests.programs import found_by
from tests.sockets import listeners
from tests.verl_like.groups import start

OF_RAY_DEFAULT = {("DashboardAgent", "node"), ("DashboardAgent", "loopback")}
"""These listen only if `ray[default]` is installed and no other cluster has their port."""


def documented() -> set[tuple[str, str]]:
    """(process, kind of address) of the table's rows."""
    lines = (ROOT / "docs/security.md").read_text(encoding="utf-8").splitlines()
    start = lines.index("| Process | Address | Purpose | Who can connect |") + 2
    rows = set()
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        processes, addresses = (cell.strip().split(", ") for cell in line.split("|")[1:3])
        rows |= set(product(processes, addresses))
    return rows


@pytest.mark.long
@pytest.mark.ray
def test_a_run_on_ray_has_exactly_the_documented_sockets(forked_python: Path) -> None:
    report = found_by(forked_python, "tests.integration.listening", limit_s=150)
    sockets = {tuple(row) for row in report["found"]}
    assert sockets | OF_RAY_DEFAULT == documented()


def test_without_ray_all_sockets_are_on_loopback() -> None:
    with start("child", {"actor": (Meeting, ())}, [2]) as group:
        workers = group.meet()
        address = group.open_weight_channel()[0]
        sockets = listeners(workers)
    assert len(sockets) >= 4
    assert {kind_of(host) for host, _, _ in sockets} == {"loopback"}
    assert int(address.split("/")[0].split(":")[1]) in {port for _, port, _ in sockets}


@pytest.mark.ray
def test_only_the_user_can_read_ray_s_session_and_token(ray_session: None) -> None:
    import ray

    session = Path(ray._private.worker._global_node.get_session_dir_path())
    private = session.parent.parent
    assert private.name == f"verl-like-{os.getuid()}"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    token = Path.home() / ".ray" / "auth_token"
    assert not token.exists() or stat.S_IMODE(token.stat().st_mode) == 0o600
