"""The socket between a process and one that runs untrusted code for it.

Requests go to that process as a pickle behind its length, since they are our own; what it answers
is JSON, one answer a line, of bounded length, and is checked before it is believed.
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
"""Bytes of one answer beyond which it is none."""
_LENGTH = struct.Struct("!Q")


class NoAnswerError(Exception):
    """What came through the socket is no answer."""


class DriverEnd:
    """The end of the process that asks; each call has a deadline, by `time.monotonic`."""

    def __init__(self, pipe: Connection) -> None:
        """Takes the pipe of `start_child` over."""
        self._socket = socket.socket(fileno=os.dup(pipe.fileno()))
        pipe.close()
        self._lines: deque[bytes] = deque()
        self._rest = b""

    def send(self, message: Any, deadline: float) -> None:
        """Send it; a TimeoutError if the process does not read, an OSError if it is gone."""
        content = pickle.dumps(message)
        self._socket.settimeout(_left(deadline))
        self._socket.sendall(_LENGTH.pack(len(content)) + content)

    def receive(self, deadline: float) -> Any:
        """The next answer; a TimeoutError, OSError, EOFError or NoAnswerError if there is none."""
        while not self._lines:
            self._socket.settimeout(_left(deadline))
            chunk = self._socket.recv(65536)
            if not chunk:
                raise EOFError
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            if len(self._rest) > LONGEST_ANSWER:
                raise NoAnswerError(f"gave an answer of more than {LONGEST_ANSWER} bytes")
            self._lines.extend(filter(None, lines))

        line = self._lines.popleft()
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as err:
            raise NoAnswerError(f"wrote on its socket what is no answer: {line!r:.80}") from err

    def shut(self) -> None:
        """From another thread: nothing more is read or sent, and the process sees that."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


class FunctionEnd:
    """The end of the process that answers."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._incoming = self._socket.makefile("rb")
        self._sending = threading.Lock()

    def receive(self) -> Any:
        """What the other end sends next; an EOFError when it has closed."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return pickle.loads(self._read(length))

    def send(self, answer: Any) -> None:
        line = json.dumps(answer).encode() + b"\n"
        with self._sending:
            self._socket.sendall(line)

    def _read(self, count: int) -> bytes:
        content = self._incoming.read(count)
        if len(content) < count:
            raise EOFError
        return content


def _left(deadline: float) -> float | None:
    """Seconds until then, never 0: a socket would not wait at all."""
    return None if deadline == float("inf") else max(0.001, deadline - time.monotonic())
