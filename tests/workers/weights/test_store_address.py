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


@pytest.mark.parametrize("of_rank_0", ["192.0.2.1", ""])
def test_a_sender_on_another_node_than_rank_0_opens_a_store_that_can_be_joined(
    monkeypatch: pytest.MonkeyPatch, of_rank_0: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", of_rank_0)
    store, place = open_weight_store()
    join_weight_store(place).set("joined", "here")
    assert store.get("joined") == b"here"


def test_on_the_node_of_rank_0_it_is_the_address_of_the_rendezvous(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert open_weight_store()[1].startswith("127.0.0.1:")


@pytest.mark.parametrize("num_answered", [0, 1], ids=["before it was reached", "as it was"])
def test_a_sender_that_is_killed_is_not_waited_for(num_answered: int) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    place = f"127.0.0.1:{listening.getsockname()[1]}"

    def end() -> None:
        for _ in range(num_answered):
            connection, _ = listening.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        listening.close()

    sender = threading.Thread(target=end)
    sender.start()
    if not num_answered:
        sender.join()
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=f"sender's store at {place}: .*refused"):
        join_weight_store(place)
    assert time.monotonic() - began < 10, "torch waits for 20 s and more"
    sender.join()


@pytest.mark.parametrize(
    ("names", "host", "wanted"),
    [
        ("eth0,ib0", "192.0.2.1", [{"interface": "eth0"}, {"interface": "ib0"}]),
        ("", "127.0.0.2", [{"hostname": "127.0.0.1"}]),
        ("lo", "127.0.0.2", [{"hostname": "127.0.0.1"}]),
        ("eth0", "127.0.0.1", [{"hostname": "127.0.0.1"}]),
    ],
)
def test_gloo_takes_the_interfaces_that_it_is_told_else_the_one_that_reaches_the_store(
    names: str, host: str, wanted: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
    monkeypatch.setattr(connection.dist.ProcessGroupGloo, "create_device", lambda **how: how)
    assert connection._gloo_devices(host) == wanted
