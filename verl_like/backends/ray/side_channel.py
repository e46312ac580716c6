"""The side channel of a worker process: a socket on which requests pass its queue of calls.

    endpoint = serve(address, {STACKS: answer_stacks, CALL: answer_call, ...})  # in the worker
    reply = read_reply(send_request(endpoint, CALL, body, seconds))          # on the driver

A connection carries a request and its reply, both of them bytes, and then perhaps the next ones. It
begins with the server's key. Until that has come the connection has no thread, and no more than a
few are held: strangers cost nothing, and keep no owner of the key waiting. A thread of its own
answers what comes on a connection.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from verl_like.calls.progress import REQUEST, SIDE_CHANNEL, Progress
from verl_like.errors import WorkerError, cannot_travel

logger = logging.getLogger(__name__)
STACKS, PROGRESS, CALL, KILL = b"S", b"P", b"C", b"K"
"""The kinds of request: the process's Python stacks; whether its call makes progress; a call that
runs at once; to end by SIGKILL."""
REQUEST_S = 5.0
"""How long a client may take to send its key, and then its request."""
MAX_WITHOUT_KEY = 64
"""Connections that may be open without having sent the key: the oldest makes room."""
_SIZE = struct.Struct("<Q")
_REPLY = struct.Struct("<BQ")
_ANSWERED, _FAILED = 0, 1
_CHUNK_BYTES = 1 << 20
Handler = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Endpoint:
    """Where a server listens, and its key."""

    address: str
    port: int
    key: bytes


def serve(address: str, handlers: Mapping[bytes, Handler]) -> Endpoint:
    """Listen at this address; the kind of a request says which handler makes its reply."""
    listening = socket.create_server((address, 0))
    endpoint = Endpoint(address, listening.getsockname()[1], secrets.token_bytes(16))
    acceptor = _Acceptor(listening, endpoint.key, handlers)
    threading.Thread(target=acceptor.run, name=SIDE_CHANNEL, daemon=True).start()
    return endpoint


def connect(endpoint: Endpoint, seconds: float) -> socket.socket:
    """A connection that may carry requests. OSError: no server is there."""
    connection = socket.create_connection((endpoint.address, endpoint.port), seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(endpoint.key)
    return connection


def send(connection: socket.socket, kind: bytes, body: bytes) -> None:
    """A request, after the reply to the one before. OSError: the server is gone."""
    connection.sendall(kind + _SIZE.pack(len(body)) + body)


def send_request(endpoint: Endpoint, kind: bytes, body: bytes, seconds: float) -> socket.socket:
    """The connection on which the reply will come. OSError: no server is there."""
    connection = connect(endpoint, seconds)
    send(connection, kind, body)
    return connection


def next_reply(connection: socket.socket) -> bytes:
    """The reply; waits as long as the connection's timeout says.

    OSError: the process broke off. WorkerError: the handler failed.
    """
    status, size = _REPLY.unpack(_read(connection, _REPLY.size))
    reply = _read(connection, size)
    if status == _FAILED:
        raise WorkerError(cannot_travel(reply.decode()))
    return reply


def read_reply(connection: socket.socket) -> bytes:
    """The same of the only request on a connection, which is closed then."""
    with connection:
        return next_reply(connection)


def ask_stacks(endpoint: Endpoint, seconds: float) -> str | None:
    """The stacks of a process; None if it does not answer in that time."""
    with contextlib.suppress(OSError):
        return read_reply(send_request(endpoint, STACKS, b"", seconds)).decode()
    return None


def ask_progress(endpoint: Endpoint, seconds: float) -> Progress | None:
    """What a process is doing; None if it does not answer in that time."""
    with contextlib.suppress(OSError, WorkerError):
        return Progress.read(read_reply(send_request(endpoint, PROGRESS, b"", seconds)))
    return None


class _Acceptor:
    """Accepts connections, and hands those that begin with the key to a thread each."""

    def __init__(
        self, listening: socket.socket, key: bytes, handlers: Mapping[bytes, Handler]
    ) -> None:
        self._listening, self._key, self._handlers = listening, key, handlers
        self._without_key: dict[socket.socket, tuple[bytearray, float]] = {}
        """What has come of each, and until when it may send more; the oldest first."""
        self._selector = selectors.DefaultSelector()
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)

    def run(self) -> None:
        """Until the process ends."""
        while True:
            selected = self._selector.select(self._s_until_one_is_late())
            ready = [key.fileobj for key, _ in selected]
            for connection in ready:
                if isinstance(connection, socket.socket) and connection is not self._listening:
                    self._read_key(connection)
            if self._listening in ready:
                self._accept()
            now = time.monotonic()
            for connection in [c for c, (_, until) in self._without_key.items() if until <= now]:
                self._release(connection).close()

    def _s_until_one_is_late(self) -> float | None:
        """Seconds until the oldest connection without a key is late."""
        oldest = next(iter(self._without_key.values()), None)
        return None if oldest is None else max(0.0, oldest[1] - time.monotonic())

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # gone again, or no descriptor is left for it
            connection, _ = self._listening.accept()
            connection.setblocking(False)
            if len(self._without_key) >= MAX_WITHOUT_KEY:
                self._release(next(iter(self._without_key))).close()
            self._without_key[connection] = bytearray(), time.monotonic() + REQUEST_S
            self._selector.register(connection, selectors.EVENT_READ)

    def _read_key(self, connection: socket.socket) -> None:
        came, _ = self._without_key[connection]
        try:
            chunk = connection.recv(len(self._key) - len(came))
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        came += chunk
        if chunk and len(came) < len(self._key):
            return
        self._release(connection)
        if secrets.compare_digest(bytes(came), self._key):
            work = connection, self._handlers
            threading.Thread(target=_serve, args=work, name=REQUEST, daemon=True).start()
            return
        connection.close()
        if chunk:
            logger.warning("a request without the key was turned away")

    def _release(self, connection: socket.socket) -> socket.socket:
        del self._without_key[connection]
        self._selector.unregister(connection)
        return connection


def _serve(connection: socket.socket, handlers: Mapping[bytes, Handler]) -> None:
    """Read requests and send replies, in turn; a client that is gone needs none."""
    with connection, contextlib.suppress(OSError):
        connection.settimeout(REQUEST_S)
        while True:
            kind = _read(connection, 1)
            if kind not in handlers:
                return
            connection.settimeout(REQUEST_S)
            body = _read(connection, *_SIZE.unpack(_read(connection, _SIZE.size)))
            connection.settimeout(None)  # for the handler, and until the next request
            try:
                status, reply = _ANSWERED, handlers[kind](body)
            except Exception as error:  # noqa: BLE001 - whatever a class does when (un)pickled
                status, reply = _FAILED, f"{type(error).__name__}: {error}".encode()
            connection.sendall(_REPLY.pack(status, len(reply)) + reply)


def _read(connection: socket.socket, size: int) -> bytes:
    """Exactly so many bytes."""
    read = bytearray()
    while len(read) < size:
        chunk = connection.recv(min(size - len(read), _CHUNK_BYTES))
        if not chunk:
            raise ConnectionError("the other end closed the connection")
        read += chunk
    return bytes(read)
