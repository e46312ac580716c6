"""Calls past the queue share connections, and what becomes of each is told; no Ray is needed."""

from __future__ import annotations

import pickle
import socket
import threading

import pytest

from tests.waiting import LIMIT_S, wait_until
from verl_like.backends.ray import side_channel
from verl_like.backends.ray.past_queue import PastQueue
from verl_like.backends.ray.side_channel import CALL, Endpoint
from verl_like.calls.messages import Call
from verl_like.errors import WorkerDiedError, WorkerError

HELD = threading.Event()


def answer(body: bytes) -> bytes:
    call = pickle.loads(body)
    if call.method == "fail":
        raise ValueError("no answer")
    if call.method == "hold":
        assert HELD.wait(LIMIT_S)
    return b"no pickle" if call.method == "unreadable" else pickle.dumps((b"", call.args))


@pytest.fixture
def calls() -> PastQueue:
    HELD.clear()
    return PastQueue(side_channel.serve("127.0.0.1", {CALL: answer}))


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[Endpoint]:
    made: list[Endpoint] = []
    connect = side_channel.connect

    def noted(endpoint: Endpoint, seconds: float) -> socket.socket:
        made.append(endpoint)
        return connect(endpoint, seconds)

    monkeypatch.setattr(side_channel, "connect", noted)
    return made


def call(method: str, *args: object) -> Call:
    return Call("role", method, args, past_queue=True)


def test_calls_after_each_other_share_a_connection(
    calls: PastQueue, connected: list[Endpoint]
) -> None:
    for number in range(5):
        assert calls.make(call("give", number)).result(LIMIT_S) == (b"", (number,))
    for method, words in (("fail", "no answer"), ("unreadable", "cannot travel")):
        with pytest.raises(WorkerError, match=words):
            calls.make(call(method)).result(LIMIT_S)
    assert calls.make(call("give", 5)).result(LIMIT_S) == (b"", (5,))
    assert len(connected) == 1


def test_a_call_does_not_wait_for_one_that_is_under_way(
    calls: PastQueue, connected: list[Endpoint]
) -> None:
    held = [calls.make(call("hold", number)) for number in range(3)]
    assert calls.make(call("give", 3)).result(LIMIT_S) == (b"", (3,))
    assert not any(future.done() for future in held)
    HELD.set()
    assert [future.result(LIMIT_S)[1] for future in held] == [(0,), (1,), (2,)]
    assert len(connected) == 4


def test_a_process_that_is_gone_is_told_in_the_middle_of_a_call_and_before_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        calls = PastQueue(Endpoint("127.0.0.1", listening.getsockname()[1], b"0" * 16))
        under_way = calls.make(call("give"))
        listening.accept()[0].close()
        with pytest.raises(WorkerDiedError, match="broke off while it made the call"):
            under_way.result(LIMIT_S)
    with pytest.raises(WorkerDiedError, match="its side channel does not answer"):
        calls.make(call("give")).result(LIMIT_S)


def test_a_connection_that_was_closed_while_it_was_idle_is_replaced() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        calls = PastQueue(Endpoint("127.0.0.1", listening.getsockname()[1], b"0" * 16))
        for number in range(3):
            future = calls.make(call("give", number))
            connection, _ = listening.accept()
            side_channel._read(connection, 16 + 1)
            (size,) = side_channel._SIZE.unpack(side_channel._read(connection, 8))
            body = side_channel._read(connection, size)
            reply = pickle.dumps(pickle.loads(body).args)
            connection.sendall(side_channel._REPLY.pack(0, len(reply)) + reply)
            assert future.result(LIMIT_S) == (number,)
            connection.close()
            wait_until(lambda: not calls._idle[0]._is_open)
