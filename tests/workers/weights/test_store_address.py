"""A sender's store listens where its own node is, wherever rank 0 of its group may be."""

from __future__ import annotations

import pytest

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
