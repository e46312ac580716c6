"""A head or a node that is gone is known within the five seconds that a death may take."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import ray

from verl_like.backends.ray import probes

DEATHS_S = 5.0
SLICE_S = 1.1
"""A driver that waits asks about once a second."""


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Its clock, and whether anybody listens in it."""
    now = SimpleNamespace(seconds=1000.0, listens=False)
    context = SimpleNamespace(gcs_address="192.0.2.1:6379")
    node = {"NodeID": "n" * 56, "NodeManagerAddress": "192.0.2.2", "NodeManagerPort": 7000}
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "nodes", lambda: [node])
    monkeypatch.setattr(probes, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    monkeypatch.setattr(probes, "_answers", lambda place: now.listens)
    return now


def of_the_head() -> Callable[[], str | None]:
    return probes.ClusterProbe().why_head_gone


def of_a_node() -> Callable[[], str | None]:
    probe = probes.ClusterProbe()
    return lambda: probe.why_node_gone("n" * 56)


@pytest.mark.parametrize("probed", [of_the_head, of_a_node])
def test_who_does_not_listen_is_gone_before_a_death_is_late(
    network: SimpleNamespace, probed: Callable[[], Callable[[], str | None]]
) -> None:
    why_gone, began = probed(), network.seconds
    while (why := why_gone()) is None:
        network.seconds += SLICE_S
        assert network.seconds - began <= DEATHS_S - SLICE_S, "it may have died after a look"
    assert "is gone" in why


@pytest.mark.parametrize("probed", [of_the_head, of_a_node])
def test_who_listens_again_is_not_gone(
    network: SimpleNamespace, probed: Callable[[], Callable[[], str | None]]
) -> None:
    why_gone = probed()
    for listens in (False, False, True, False, False):
        network.listens = listens
        assert why_gone() is None
        network.seconds += SLICE_S
