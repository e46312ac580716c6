"""The socket between the driver and a reward process, whose answers nobody trusts.

Samples go to the process as a pickle behind its length, since they are the driver's own; its
answers are JSON, one a line, of bounded length, and are checked before they are believed.

Waking the driver costs more than most answers. So those to the samples of one message go to a
buffer in shared memory, which wakes nobody and outlives the process, and one line on the socket
says that all are there. What the buffer has no room for goes over the socket.
"""

from __future__ import annotations

import json
import mmap
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterable
from typing import Any

from workers.rewards.outcome import Outcome

LONGEST_ANSWER = 2**22
"""Bytes of one answer beyond which it is none."""
BUFFER_BYTES = 2**16
"""Size of the shared memory."""
DONE: list[Any] = []
"""What a process says when it is through with the samples of a message."""
_LENGTH = struct.Struct("!Q")
_HEADER = struct.Struct("!QQd")
"""What the buffer begins with: the number of the message that its answers are to, where they end,
and when the last of them was given."""
USUAL_BYTES = 2**12
"""What is read of the buffer at first: mostly all that is filled."""


class NoAnswerError(Exception):
    """What came from a reward process is no answer."""


class DriverEnd:
    """The driver's end; each call has a deadline, by `time.monotonic`."""

    def __init__(self, connection: socket.socket, buffer: int | None = None) -> None:
        """`buffer` is the file that is shared, where there is one; it is read, not mapped.

        Whoever maps a file is killed when a stranger makes it shorter.
        """
        self._socket, self._buffer = connection, buffer
        self._received = b""
        self._num_messages, self._buffered_to = 0, _HEADER.size
        self.last_answer = 0.0
        """When the process has last answered, or was last asked."""

    def send(self, message: Any, deadline: float) -> None:
        """Send it; a TimeoutError if the process does not read, an OSError if it is gone."""
        content = pickle.dumps(message)
        self._num_messages, self._buffered_to = self._num_messages + 1, _HEADER.size
        self.last_answer = time.monotonic()
        self._socket.settimeout(_left(deadline))
        self._socket.sendall(_LENGTH.pack(len(content)) + content)

    def receive(self, deadline: float) -> Any:
        """The next line on the socket; a TimeoutError, EOFError or NoAnswerError if there is none.

        Waits for it.
        """
        while b"\n" not in self._received:
            if len(self._received) > LONGEST_ANSWER:
                raise NoAnswerError(f"gave an answer of more than {LONGEST_ANSWER} bytes")
            self._socket.settimeout(_left(deadline))
            chunk = self._socket.recv(65536)
            if not chunk:
                raise EOFError
            self._received += chunk

        line, _, self._received = self._received.partition(b"\n")
        return _read(line)

    def buffered(self) -> Iterable[Any]:
        """The answers in the buffer that have not been read yet; waits for nothing."""
        if self._buffer is None:
            return ()
        filled = os.pread(self._buffer, USUAL_BYTES, 0)
        number, end, when = _HEADER.unpack_from(filled.ljust(_HEADER.size, b"\0"))
        if number != self._num_messages or end <= self._buffered_to:
            return ()
        if end > USUAL_BYTES:
            filled = os.pread(self._buffer, BUFFER_BYTES, 0)
        lines = filled[self._buffered_to : end].splitlines()
        self._buffered_to = end
        self.last_answer = min(max(self.last_answer, when), time.monotonic())
        return _read_all(lines)

    def close(self) -> None:
        """The process reads its end."""
        self._socket.close()
        if self._buffer is not None:
            os.close(self._buffer)
            self._buffer = None


def _read_all(lines: list[bytes]) -> Iterable[Any]:
    """What these lines say, in a quarter of the time of reading each."""
    try:
        said: list[Any] = json.loads(b"[%s]" % b",".join(lines))
    except (ValueError, RecursionError):
        return map(_read, lines)  # up to the one that is no answer
    return said


def _read(line: bytes) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as err:
        raise NoAnswerError(f"wrote on its socket what is no answer: {line!r:.80}") from err


class FunctionEnd:
    """The reward process's end."""

    def __init__(self, connection: socket.socket, buffer: int | None = None) -> None:
        """`buffer` as at the driver's end."""
        self._socket = connection
        self._incoming = connection.makefile("rb")
        self._buffer = None if buffer is None else mmap.mmap(buffer, BUFFER_BYTES)
        self._num_messages, self._filled_to = 0, _HEADER.size
        self._sending = threading.Lock()

    def receive(self) -> Any:
        """What the driver sends next; an EOFError when it has closed."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        self._num_messages, self._filled_to = self._num_messages + 1, _HEADER.size
        return pickle.loads(self._read(length))

    def send(self, answer: Any) -> None:
        """A line on the socket, as JSON has it: the driver is woken."""
        with self._sending:
            self._socket.sendall(_line(answer))

    def put(self, number: int, outcome: Outcome) -> None:
        """Answer a sample: in the buffer, or over the socket where that has no room."""
        line = _answer(number, outcome)
        with self._sending:
            end = self._filled_to + len(line)
            if self._buffer is None or end > BUFFER_BYTES:
                self._socket.sendall(line)
                return
            self._buffer[self._filled_to : end] = line
            _HEADER.pack_into(self._buffer, 0, self._num_messages, end, time.monotonic())
            self._filled_to = end

    def _read(self, count: int) -> bytes:
        content = self._incoming.read(count)
        if len(content) < count:
            raise EOFError
        return content


def _line(answer: Any) -> bytes:
    return json.dumps(answer).encode() + b"\n"


def _answer(number: int, outcome: Outcome) -> bytes:
    """`_line` of them, for most in a sixth of the time."""
    score, extras, error = outcome
    if type(score) is float and not extras and error is None:
        return b"[%d, [%a, {}, null]]\n" % (number, score)
    return _line([number, outcome])


def _left(deadline: float) -> float:
    """Seconds until then, never 0: a socket would not wait at all."""
    return max(0.001, deadline - time.monotonic())
