"""The side channel answers who has its key, whatever strangers do meanwhile; no Ray is needed."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from verl_like.backends.ray import side_channel
from verl_like.backends.ray.side_channel import CALL, MAX_WITHOUT_KEY, Endpoint

HANDLERS = {CALL: bytes.upper}


@pytest.fixture
def endpoint() -> Endpoint:
    return side_channel.serve("127.0.0.1", HANDLERS)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as at_end:
        yield at_end


def connected(endpoint: Endpoint, stack: ExitStack) -> socket.socket:
    address = endpoint.address, endpoint.port
    return stack.enter_context(socket.create_connection(address, 5.0))


def answer(endpoint: Endpoint) -> bytes:
    return side_channel.read_reply(side_channel.send_request(endpoint, CALL, b"text", 5.0))


def test_idle_connections_keep_nobody_waiting_and_cost_no_threads(
    endpoint: Endpoint, stack: ExitStack
) -> None:
    before = threading.active_count()
    strangers = [connected(endpoint, stack) for _ in range(3 * MAX_WITHOUT_KEY)]
    began = time.monotonic()
    assert answer(endpoint) == b"TEXT"
    assert time.monotonic() - began < side_channel.REQUEST_S / 2, "they have so long each"
    assert threading.active_count() <= before + 1
    assert strangers[0].recv(1) == b""
    strangers[-1].settimeout(0.05)
    with pytest.raises(TimeoutError):
        strangers[-1].recv(1)


def test_a_key_that_comes_in_pieces_is_a_key(endpoint: Endpoint, stack: ExitStack) -> None:
    connection = connected(endpoint, stack)
    whole = endpoint.key + CALL + side_channel._SIZE.pack(4) + b"text"
    for i in range(0, len(whole), 5):
        connection.sendall(whole[i : i + 5])
        time.sleep(0.005)
    assert side_channel.read_reply(connection) == b"TEXT"


@pytest.mark.parametrize("sent", [b"", b"0123", b"0" * 16, b"\0" * 1000])
def test_who_sends_another_key_or_half_of_it_is_turned_away(
    endpoint: Endpoint, stack: ExitStack, sent: bytes
) -> None:
    connection = connected(endpoint, stack)
    with suppress(OSError):  # it may be turned away while it still sends
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
    with suppress(ConnectionResetError):
        assert connection.recv(1) == b""
    assert answer(endpoint) == b"TEXT"


def test_who_says_nothing_is_let_go_in_time(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_channel, "REQUEST_S", 0.1)
    connection = connected(side_channel.serve("127.0.0.1", HANDLERS), stack)
    assert connection.recv(1) == b""
