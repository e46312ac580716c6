"""A socket between a process and another process that runs untrusted code for it.

Requests are pickled with a length prefix, because our own code writes them. Replies come from
untrusted code, so they are JSON, one per line, of limited length, and are checked before use.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import threading
import time
from collections import deque
from multiprocessing.connection import Connection
from typing import Any

LONGEST_ANSWER = 2**22
"""Replies with more bytes are rejected."""
_LENGTH = struct.Struct("!Q")


class NoAnswerError(Exception):
    """Raised after an invalid reply, or if the replying process has ended.

    The message says what that process did, such as "ended with exit code 1".
    """


class DriverEnd:
    """The requesting process's end; deadlines are times of `time.monotonic`."""

    def __init__(self, pipe: Connection) -> None:
        """Take over the pipe of `start_child`."""
        self._socket = socket.socket(fileno=os.dup(pipe.fileno()))
        pipe.close()
        self._lines: deque[bytes] = deque()
        self._rest = b""

    def send(self, message: Any, deadline: float) -> None:
        """Send a message; raise TimeoutError if it is not read, OSError if nobody can read it."""
        content = pickle.dumps(message)
        self._socket.settimeout(_left(deadline))
        self._socket.sendall(_LENGTH.pack(len(content)) + content)

    def receive(self, deadline: float) -> Any:
        """Return the next reply, or raise TimeoutError, OSError, EOFError or NoAnswerError."""
        while not self._lines:
            self._socket.settimeout(_left(deadline))
            chunk = self._socket.recv(65536)
            if not chunk:
                raise EOFError
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            if len(self._rest) > LONGEST_ANSWER:
                raise NoAnswerError(f"sent a reply of more than {LONGEST_ANSWER} bytes")
            self._lines.extend(filter(None, lines))

        line = self._lines.popleft()
        try:
            reply = json.loads(line)
        except (ValueError, RecursionError) as err:
            raise NoAnswerError(f"sent an invalid reply: {line!r:.80}") from err
        if isinstance(reply, dict):  # from its supervisor (`verl_like.process.supervisor`)
            raise NoAnswerError(f"{reply.get('ended')!s:.1000}")
        return reply

    def shut(self) -> None:
        """Stop reading and sending, from another thread; the replying process then ends."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class FunctionEnd:
    """The end of the replying process."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._incoming = self._socket.makefile("rb")
        self._sending = threading.Lock()

    def receive(self) -> Any:
        """Return the next message; raise EOFError when the other end has closed."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return pickle.loads(self._read(length))

    def send(self, answer: Any) -> None:
        line = json.dumps(answer).encode() + b"\n"
        with self._sending:
            self._socket.sendall(line)

    def close(self) -> None:
        self._incoming.close()
        self._socket.close()

    def _read(self, count: int) -> bytes:
        content = self._incoming.read(count)
        if len(content) < count:
            raise EOFError
        return content


def _left(deadline: float) -> float | None:
    """Return the seconds until the deadline, or None without one.

    They are never 0, which would make a socket non-blocking.
    """
    return None if deadline == float("inf") else max(0.001, deadline - time.monotonic())
