"""The address for agents on other machines goes on whatever strangers without a key send."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until
from workers.agents import router
from workers.agents.router import Router

KEY = "0123456789abcdef"
REQUEST = f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
STRANGERS = """
import socket, sys, time
port, count = map(int, sys.argv[1:])
connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
print("connected", flush=True)
time.sleep(600)
"""


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Router]:
    """A router to a session whose endpoint answers with the request."""
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as endpoint:
        endpoint.bind(KEY)
        endpoint.listen()

        def echo() -> None:
            while True:
                try:
                    connection, _ = endpoint.accept()
                except OSError as error:
                    if error.errno == errno.EMFILE:
                        continue
                    return
                with connection:
                    connection.sendall(connection.recv(4096))

        threading.Thread(target=echo, daemon=True).start()
        opened = Router("127.0.0.1:0")
        opened.folder = str(tmp_path)
        yield opened
        opened.close()


def port_of(opened: Router) -> int:
    return int(opened.url.rpartition(":")[2])


def answer_of(opened: Router) -> bytes:
    with socket.create_connection(("127.0.0.1", port_of(opened)), timeout=60) as client:
        client.sendall(REQUEST)
        return client.recv(4096)


def answer_or_none(opened: Router) -> bytes | None:
    """Return the answer; None if the strangers' connections take all files of this process."""
    try:
        return answer_of(opened)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return None


def connect_strangers(opened: Router, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", STRANGERS, str(port_of(opened)), str(count)]
    strangers = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert strangers.stdout is not None
    strangers.stdout.readline()
    return strangers


@pytest.mark.linux
def test_idle_connections_of_strangers_do_not_end_the_endpoint(
    opened: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "GRACE_S", 0.5)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert answer_of(opened) == REQUEST
    number = len(os.listdir("/proc/self/fd")) + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    try:
        with connect_strangers(opened, 100) as strangers:
            try:
                wait_until(lambda: answer_or_none(opened) == REQUEST)
            finally:
                strangers.kill()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_client_with_a_key_waits_for_a_file_that_the_process_may_open(
    opened: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refused(socket.socket):
        count = 0

        def __init__(self, family: int = -1, *arguments: Any, **named: Any) -> None:
            if family == socket.AF_UNIX and Refused.count < 2:
                Refused.count += 1
                raise OSError(errno.EMFILE, "too many open files")
            super().__init__(family, *arguments, **named)

    monkeypatch.setattr(router.socket, "socket", Refused)
    assert answer_of(opened) == REQUEST
    assert Refused.count == 2


def test_connections_without_a_key_take_few_threads(
    opened: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "MAX_WAITING", 8)
    monkeypatch.setattr(router, "GRACE_S", 0.5)
    before = threading.active_count()
    with connect_strangers(opened, 60) as strangers:
        try:
            assert answer_of(opened) == REQUEST
            wait_until(lambda: threading.active_count() - before <= 8)
        finally:
            strangers.kill()


def test_a_head_that_comes_byte_by_byte_has_one_time_limit(
    opened: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "HEAD_S", 0.3)
    with socket.create_connection(("127.0.0.1", port_of(opened)), timeout=0.05) as client:
        for number in range(400):
            try:
                client.sendall(REQUEST[number % 4 : number % 4 + 1])
                if client.recv(1) == b"":
                    return
            except TimeoutError:
                continue
            except OSError:
                return
    pytest.fail("the connection was not ended")
