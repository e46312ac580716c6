"""Requests next to a process's queue of calls: their results and errors, and who may connect."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from tests.waiting import LIMIT_S, wait_until
from verl_like.backends import rpc
from verl_like.backends.rpc import Endpoint, Requests
from verl_like.calls.messages import Call
from verl_like.errors import WorkerDiedError, WorkerError


class Unreadable:
    """Can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


class Host:
    """Responds as a `WorkerHost` does."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def call(self, call: Call, parts: Any) -> tuple[Any, str]:
        if call.method == "fail":
            raise ValueError("no answer")
        if call.method == "hold":
            assert self.released.wait(LIMIT_S)
        return Unreadable() if call.method == "unreadable" else call.args, "header"

    def stacks(self) -> str:
        return "idle"


@pytest.fixture
def host() -> Any:
    return Host()


@pytest.fixture
def endpoint(host: Any) -> Endpoint:
    return rpc.listen("127.0.0.1", host)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as at_end:
        yield at_end


def connect(endpoint: Endpoint) -> Requests:
    return rpc.connect(endpoint, lambda: "the process is gone.")


def stranger(endpoint: Endpoint, stack: ExitStack) -> socket.socket:
    address = endpoint.address, endpoint.port
    return stack.enter_context(socket.create_connection(address, 5.0))


def make(requests: Requests, method: str, *args: object) -> Any:
    call = Call("role", method, args, concurrent=True)
    return requests.ask("concurrent", call, ())


def test_calls_return_payload_and_header_or_an_error(endpoint: Endpoint) -> None:
    requests = connect(endpoint)
    for number in range(5):
        assert make(requests, "give", number).result(LIMIT_S) == ((number,), "header")
    for method, words in (
        ("fail", "cannot be pickled.*no answer"),
        ("unreadable", "cannot read the answer"),
    ):
        with pytest.raises(WorkerError, match=words):
            make(requests, method).result(LIMIT_S)
    with pytest.raises(WorkerError, match="arguments cannot be sent"):
        make(requests, "give", threading.Lock()).result(LIMIT_S)
    assert make(requests, "give", 5).result(LIMIT_S) == ((5,), "header")


def test_a_request_does_not_wait_for_a_running_one(endpoint: Endpoint, host: Any) -> None:
    requests = connect(endpoint)
    pending = [make(requests, "hold", number) for number in range(3)]
    assert requests.ask("stacks").result(LIMIT_S) == "idle"
    assert not any(future.done() for future in pending)
    host.released.set()
    assert [future.result(LIMIT_S)[0] for future in pending] == [(0,), (1,), (2,)]


def test_a_dead_process_is_reported_during_and_before_a_request() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        endpoint = Endpoint("127.0.0.1", listening.getsockname()[1], b"0" * 16)
        requests = connect(endpoint)
        under_way = requests.ask("stacks")
        listening.accept()[0].close()
        with pytest.raises(WorkerDiedError, match="the process is gone"):
            under_way.result(LIMIT_S)
        wait_until(lambda: requests.dead is not None)
        with pytest.raises(WorkerDiedError, match="the process is gone"):
            requests.ask("stacks").result(LIMIT_S)
    with pytest.raises(WorkerDiedError, match=r"the process is gone\. \(.*refused"):
        connect(endpoint)


def test_the_serving_thread_ends_when_the_driver_disconnects(endpoint: Endpoint) -> None:
    def num_answering() -> int:
        return sum(thread.name == "pipe" for thread in threading.enumerate())

    before = num_answering()
    requests = connect(endpoint)
    assert requests.ask("stacks").result(LIMIT_S) == "idle"
    with socket.socket(fileno=requests._connection._handle) as ours:  # type: ignore[attr-defined]
        ours.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: num_answering() < before)
        ours.detach()


def test_connections_without_a_key_do_not_delay_the_driver(
    endpoint: Endpoint, stack: ExitStack
) -> None:
    for _ in range(50):
        stranger(endpoint, stack)
    began = time.monotonic()
    assert connect(endpoint).ask("stacks").result(LIMIT_S) == "idle"
    assert time.monotonic() - began < rpc.KEY_TIMEOUT_S / 2, "each of them may take KEY_TIMEOUT_S"


def test_a_key_may_arrive_in_pieces(endpoint: Endpoint, stack: ExitStack) -> None:
    connection = stranger(endpoint, stack)
    for byte in endpoint.key:
        connection.sendall(bytes([byte]))
        time.sleep(0.002)
    requests = Requests(rpc._connection_over(connection), lambda: "gone")
    assert requests.ask("stacks").result(LIMIT_S) == "idle"


@pytest.mark.parametrize("sent", [b"", b"0123", b"0" * 16, b"\0" * 1000])
def test_a_wrong_or_partial_key_is_rejected(
    endpoint: Endpoint, stack: ExitStack, sent: bytes
) -> None:
    connection = stranger(endpoint, stack)
    with suppress(OSError):  # it may be disconnected while it still sends
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
    with suppress(ConnectionResetError):
        assert connection.recv(1) == b""
    assert connect(endpoint).ask("stacks").result(LIMIT_S) == "idle"


def test_a_silent_connection_is_closed_after_a_timeout(
    host: Any, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "KEY_TIMEOUT_S", 0.1)
    assert stranger(rpc.listen("127.0.0.1", host), stack).recv(1) == b""


def test_only_one_driver_can_connect(endpoint: Endpoint) -> None:
    requests = connect(endpoint)
    assert requests.ask("stacks").result(LIMIT_S) == "idle"
    with pytest.raises(WorkerDiedError, match="refused"):
        connect(endpoint)
