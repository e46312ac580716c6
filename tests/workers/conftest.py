"""Makes `distributed` and `samples` of this folder importable by its tests; two groups whose ranks
are threads.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture
def actor(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    from stand_ins import Group, Sender

    return Group([Sender(0), Sender(1)])


@pytest.fixture
def rollout():
    from stand_ins import Group, Receiver

    return Group([Receiver(0, 2), Receiver(1, 2)])
