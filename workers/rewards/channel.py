"""The socket between the driver and a reward process, whose answers nobody trusts.

Samples go to the process as a pickle behind its length, since they are the driver's own; its
answers are JSON, one a line, of bounded length, and are checked before they are believed.
"""

from __future__ import annotations

import json
import pickle
import socket
import struct
import threading
import time
from typing import Any

LONGEST_ANSWER = 2**22
"""Bytes of one answer beyond which it is none."""
BURST_S = 0.0005
"""Answers mostly follow each other closely: after the first, those of so long are read at once."""
_LENGTH = struct.Struct("!Q")


class NoAnswerError(Exception):
    """What came from a reward process is no answer."""


class DriverEnd:
    """The driver's end; each call has a deadline, by `time.monotonic`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = b""
        self._has_answered = False

    def send(self, message: Any, deadline: float) -> None:
        """Send it; a TimeoutError if the process does not read, an OSError if it is gone."""
        content = pickle.dumps(message)
        self._has_answered = False
        self._socket.settimeout(_left(deadline))
        self._socket.sendall(_LENGTH.pack(len(content)) + content)

    def receive(self, deadline: float) -> Any:
        """The next answer; a TimeoutError, EOFError or NoAnswerError if there is none."""
        while b"\n" not in self._received:
            if len(self._received) > LONGEST_ANSWER:
                raise NoAnswerError(f"gave an answer of more than {LONGEST_ANSWER} bytes")
            if self._has_answered:
                time.sleep(BURST_S)  # waking for each would cost more than reading it
            self._socket.settimeout(_left(deadline))
            chunk = self._socket.recv(65536)
            if not chunk:
                raise EOFError
            self._received += chunk

        self._has_answered = True
        line, _, self._received = self._received.partition(b"\n")
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as err:
            raise NoAnswerError(f"wrote on its socket what is no answer: {line!r:.80}") from err

    def close(self) -> None:
        """The process reads its end."""
        self._socket.close()


class FunctionEnd:
    """The reward process's end."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._incoming = connection.makefile("rb")
        self._sending = threading.Lock()

    def receive(self) -> Any:
        """What the driver sends next; an EOFError when it has closed."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return pickle.loads(self._read(length))

    def send(self, answer: Any) -> None:
        """An answer, as JSON has it."""
        line = json.dumps(answer).encode() + b"\n"
        with self._sending:
            self._socket.sendall(line)

    def _read(self, count: int) -> bytes:
        content = self._incoming.read(count)
        if len(content) < count:
            raise EOFError
        return content


def _left(deadline: float) -> float:
    """Seconds until then, never 0: a socket would not wait at all."""
    return max(0.001, deadline - time.monotonic())
