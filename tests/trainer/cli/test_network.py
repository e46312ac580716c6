"""`verl-like doctor` lists network interfaces, and NCCL settings that name none of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.cli import doctor

NETWORKS = {"lo": "127.0.0.1", "eth0": "10.0.0.5", "ib0": "10.1.0.5", "docker0": ""}


def problems(settings: dict[str, str]) -> list[tuple[str, str]]:
    return list(doctor.wrong_settings(settings, NETWORKS))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"NCCL_SOCKET_IFNAME": "eth,ib"},
        {"NCCL_SOCKET_IFNAME": "^docker,lo"},
        {"GLOO_SOCKET_IFNAME": "eth0,ib0"},
        {"NCCL_SOCKET_IFNAME": "=eth0"},
        {"NCCL_DEBUG": "WARN", "NCCL_SOCKET_IFNAME": ""},
    ],
)
def test_settings_that_name_existing_interfaces_are_accepted(settings: dict[str, str]) -> None:
    assert problems(settings) == []


@pytest.mark.parametrize(
    ("settings", "problem", "fix"),
    [
        (
            {"NCCL_SOCKET_IFNAME": "ens3"},
            "NCCL_SOCKET_IFNAME=ens3: ens3 is not an interface of this machine, "
            "which has eth0, ib0",
            "export NCCL_SOCKET_IFNAME=eth0",
        ),
        (
            {"GLOO_SOCKET_IFNAME": "eth"},
            "GLOO_SOCKET_IFNAME=eth: eth is not an interface of this machine, which has eth0, ib0",
            "export GLOO_SOCKET_IFNAME=eth0",
        ),
    ],
)
def test_an_unknown_name_is_a_problem(settings: dict[str, str], problem: str, fix: str) -> None:
    assert problems(settings) == [(problem, fix)]


def test_adapters_have_the_state_of_their_port(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n", encoding="utf-8")
    (tmp_path / "mlx5_1").mkdir()
    assert doctor.infiniband_adapters(tmp_path) == {"mlx5_0": "ACTIVE", "mlx5_1": "unknown"}
    assert doctor.infiniband_adapters(tmp_path / "none") == {}


def test_doctor_lists_the_network_and_each_unknown_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "network_interfaces", lambda: NETWORKS)
    monkeypatch.setattr(doctor, "infiniband_adapters", lambda: {"mlx5_0": "DOWN"})
    settings = {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_DEBUG": "WARN"}
    monkeypatch.setattr(doctor, "network_settings", lambda: settings)
    fine, failing, *_ = map(str, doctor.check_network())
    assert fine == (
        "ok    network       lo 127.0.0.1, eth0 10.0.0.5, ib0 10.1.0.5, mlx5_0 (DOWN), "
        "GLOO_SOCKET_IFNAME=eth1, NCCL_DEBUG=WARN"
    )
    assert failing.startswith(
        "FAIL  network       GLOO_SOCKET_IFNAME=eth1: eth1 is not an interface"
    )
    assert failing.endswith(" → export GLOO_SOCKET_IFNAME=eth0")


def test_only_variables_of_nccl_and_gloo_are_shown() -> None:
    environment = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "lo", "HF_TOKEN": "secret"}
    assert doctor.network_settings(environment) == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_DEBUG": "INFO",
    }


@pytest.mark.parametrize(
    ("address", "settings", "is_problem"),
    [
        ("127.0.1.1", {}, True),
        ("", {}, True),
        ("10.0.0.5", {}, False),
        ("127.0.1.1", {"GLOO_SOCKET_IFNAME": "eth0"}, False),
    ],
)
def test_a_host_name_that_resolves_to_loopback_is_a_problem_for_gloo(
    address: str, settings: dict[str, str], is_problem: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(name: str) -> str:
        if not address:
            raise OSError(name)
        return address

    monkeypatch.setattr(doctor.socket, "gethostbyname", resolve)
    problem = doctor.name_that_leads_nowhere(settings, NETWORKS)
    assert (problem is not None) == is_problem
    if problem:
        assert f"resolves to {address or 'nothing'}" in problem[0]
        assert problem[1] == "export GLOO_SOCKET_IFNAME=eth0"
