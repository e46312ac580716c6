"""The address at which agents on other machines reach the endpoints of trajectories.

    router = Router("0.0.0.0:8000")     # this port, or the next free one
    router.url                          # http://MACHINE:8000
    router.folder = "FOLDER"            # has each trajectory's socket, named by the session's key

    agent --TCP--> Router --socket named KEY--> endpoint in the trajectory's process

The first request of a connection must have the key in a header, `Authorization: Bearer KEY` or
`x-api-key: KEY`. Without the key of a trajectory, it gets the status 401 and reaches no endpoint.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from contextlib import closing, suppress

from verl_like.errors import ConfigError
from verl_like.process.machine import address_toward, http_url

KEY = re.compile(
    rb"^(?:authorization:[ \t]*bearer|x-api-key:)[ \t]*([0-9a-f]+)[ \t]*\r$", re.I | re.M
)
MAX_PORTS = 64
"""Number of consecutive ports to try, because each rollout process of a machine needs one."""
LONGEST_HEAD = 2**16
ELSEWHERE = "192.0.2.1"
"""An address reserved for documentation; the route to it shows this machine's own address."""
HEAD_S = 30.0
"""Time limit for a connection to send the headers of its first request."""
MAX_WAITING, GRACE_S, PAUSE_S = 128, 1.0, 0.01
"""Most connections without a key. For another one, the oldest ends, once it is this many seconds
old; pause between attempts to make room."""
NO_KEY = b'{"type": "error", "error": {"type": "authentication_error", "message": "no such key"}}'
NOT_ALLOWED = (
    b"HTTP/1.1 401 Unauthorized\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(NO_KEY), NO_KEY)
)


class Router:
    """Forwards each connection to the endpoint whose key its first request contains."""

    def __init__(self, address: str) -> None:
        """Listen at ADDRESS:PORT, or at the next free port."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(
                f"environment.endpoint={address}: use ADDRESS:PORT, such as 0.0.0.0:8000"
            )
        self.folder, self._is_closed = "", False
        self._waiting: dict[socket.socket, float] = {}
        """The connections without a key, and the times of their arrival, oldest first."""
        self._server = _listen(host, int(port))
        reachable = address_toward(ELSEWHERE) if host in ("0.0.0.0", "::") else host
        self.url = http_url(reachable, self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no more connections."""
        self._is_closed = True
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._server.accept()
                self._waiting[client] = time.monotonic()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()
                has_room = len(self._waiting) < MAX_WAITING
            except (OSError, RuntimeError):  # closed, or no more files or threads
                has_room = False
            while not has_room and not self._is_closed:
                has_room = self._end_oldest()

    def _end_oldest(self) -> bool:
        """End the oldest connection without a key; return True if there is room for another."""
        waiting = [*self._waiting.copy().items()]  # in the order of their arrival
        if not waiting or time.monotonic() - waiting[0][1] < GRACE_S:
            time.sleep(PAUSE_S)
        else:
            oldest, _ = waiting[0]
            self._waiting.pop(oldest, None)
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        return len(self._waiting) < MAX_WAITING

    def _serve(self, client: socket.socket) -> None:
        """Connect a client to the socket of the session whose key its request has."""
        with closing(client), suppress(OSError):
            try:
                head = _head(client)
            finally:
                self._waiting.pop(client, None)
            client.settimeout(None)
            match = KEY.search(head.partition(b"\r\n\r\n")[0] + b"\r")
            with self._local_socket() as endpoint:
                try:
                    endpoint.connect(os.path.join(self.folder, match[1].decode() if match else ""))
                except OSError:
                    client.sendall(NOT_ALLOWED)
                    return
                endpoint.sendall(head)
                back = threading.Thread(target=_copy, args=(endpoint, client), daemon=True)
                back.start()
                _copy(client, endpoint)
                back.join()

    def _local_socket(self) -> socket.socket:
        """Return a socket; if the process may open no more files, end connections without a key."""
        while True:
            try:
                return socket.socket(socket.AF_UNIX)
            except OSError:
                if self._is_closed:
                    raise
                self._end_oldest()


def _head(client: socket.socket) -> bytes:
    """Return the first bytes of a connection, with all headers of its first request."""
    head, end = b"", time.monotonic() + HEAD_S
    while b"\r\n\r\n" not in head and len(head) < LONGEST_HEAD:
        client.settimeout(max(end - time.monotonic(), 0.001))
        chunk = client.recv(LONGEST_HEAD)
        if not chunk:
            raise ConnectionError("the client has ended the connection")
        head += chunk
    return head


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Forward bytes until one side ends, then shut down both."""
    with suppress(OSError):
        while chunk := source.recv(65536):
            target.sendall(chunk)
    for end in (source, target):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def _listen(host: str, port: int) -> socket.socket:
    for number in range(port, port + MAX_PORTS):
        try:
            return socket.create_server((host, number))
        except OSError as error:
            problem = error
    raise ConfigError(
        f"environment.endpoint={host}:{port}: cannot listen on any port from {port} to "
        f"{port + MAX_PORTS - 1}: {problem}"
    )
