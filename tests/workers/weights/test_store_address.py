"""A sender's store listens where its own node is, wherever rank 0 of its group may be."""

from __future__ import annotations

import socket
import struct
import threading
import time

import pytest

from verl_like.errors import WeightSyncError
from workers.weights import connection
from workers.weights.connection import join_weight_store, open_weight_store


@pytest.fixture(autouse=True)
def several_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)


@pytest.mark.parametrize("master_address", ["192.0.2.1", ""])
def test_a_sender_on_another_node_than_rank_0_opens_a_reachable_store(
    monkeypatch: pytest.MonkeyPatch, master_address: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", master_address)
    store, address = open_weight_store()
    join_weight_store(address).set("joined", "here")
    assert store.get("joined") == b"here"


def test_a_store_on_the_node_of_rank_0_has_the_rendezvous_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert open_weight_store()[1].startswith("127.0.0.1:")


@pytest.mark.parametrize("num_accepted", [0, 1], ids=["before it was reached", "as it was"])
def test_no_rank_waits_for_the_store_of_a_killed_sender(num_accepted: int) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{listening.getsockname()[1]}"

    def end() -> None:
        for _ in range(num_accepted):
            connection, _ = listening.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        listening.close()

    sender = threading.Thread(target=end)
    sender.start()
    if not num_accepted:
        sender.join()
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=f"sender's store at {address}: .*refused"):
        join_weight_store(address)
    assert time.monotonic() - began < 10, "torch waits for 20 s and more"
    sender.join()


@pytest.mark.parametrize(
    ("names", "host", "devices"),
    [
        ("eth0,ib0", "192.0.2.1", [{"interface": "eth0"}, {"interface": "ib0"}]),
        ("", "127.0.0.2", [{"hostname": "127.0.0.1"}]),
        ("lo", "127.0.0.2", [{"hostname": "127.0.0.1"}]),
        ("eth0", "127.0.0.1", [{"hostname": "127.0.0.1"}]),
    ],
)
def test_gloo_uses_the_set_interfaces_or_the_one_of_the_store(
    names: str, host: str, devices: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
    monkeypatch.setattr(
        connection.dist.ProcessGroupGloo, "create_device", lambda **options: options
    )
    assert connection._gloo_devices(host) == devices
