"""Two groups whose ranks are threads, and whose weights are synced."""

from __future__ import annotations

import pytest

from tests.workers.stand_ins import Group, Receiver, Sender


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Group:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return Group([Sender(0), Sender(1)])


@pytest.fixture
def rollout() -> Group:
    return Group([Receiver(0, 2), Receiver(1, 2)])
