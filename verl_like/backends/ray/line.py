"""A line to a worker process: small calls that somebody waits for go over a socket, at a fraction
of a task's price.

    answer = line.take(call)         # None: it has to go as a task of the actor, after `line.leave()`
    answer.arrives(seconds)          # then `answer.header`, and `answer.payload` if the method has one
    answer = call_past_queue(door, call)     # runs at once, in a thread of its own

A process comes to its line by a task (`RayHost.attend`) and stays there until told to leave, which
happens before any other task is queued. So calls run in the order in which they were made,
whichever way they go, in the process's main thread. A result that is too large for the line is what
that task returns, in a tuple: it lies in the object store.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle

from verl_like.backends.ray.side_channel import LINE, PAST_QUEUE, Door, knock
from verl_like.calls.pack import SHARED_BYTES
from verl_like.calls.transport import Call

CALL = struct.Struct("<II")
"""The bytes of a call; without any, the process shall leave, and which of its stays ends."""
ANSWER = struct.Struct("<IIB")
"""The bytes of header and payload, and what the process did: one of the following."""
ANSWERED, LEFT, FAILED = range(3)
_CONNECT_S = 2.0
PIECE_BYTES = 65536
"""Read at once: the memory for more would be mapped and unmapped each time."""


class Line:
    """The driver's end, held (`with line:`) while a call is sent. It carries one call at a time."""

    def __init__(self, attend: Callable[[int], Any], door: Door) -> None:
        """`attend` queues the task by which the process comes to the line, for its stay of that
        number.
        """
        self._attend, self._door = attend, door
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._broken = False
        self._stay, self._there, self._task = 0, False, None
        self._offered = self._after_small = False
        self._last: Answer | None = None
        self._packed: dict[tuple[str, str], bytes] = {}

    def __enter__(self) -> Line:
        """Nobody else uses it (or queues a task) until it is released."""
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        """Release it."""
        self._lock.release()

    def take(self, call: Call) -> Answer | None:
        """Send a call, if it is small, not the first small one in a row, and nothing on the line is
        unanswered.
        """
        self._offered = True
        if (
            not self._after_small
            or self._broken
            or not (self._last is None or self._last.arrives(0.0))
        ):
            return None
        packed = self._pack(call)
        answer = None if packed is None else self._send(packed)
        self._offered = answer is None
        return answer

    def leave(self) -> None:
        """Let the process go, for a task that will be queued now."""
        self._after_small, self._offered = self._offered, False
        if self._there and self._socket is not None:
            self._there = False
            with contextlib.suppress(OSError):
                self._socket.sendall(CALL.pack(0, self._stay))

    def left(self, stay: int) -> None:
        """The process has left by itself."""
        with self._lock:
            self._there = self._there and self._stay != stay

    def _pack(self, call: Call) -> bytes | None:
        key = call.role, call.method
        bare = not call.args and not call.kwargs
        packed = self._packed.get(key) if bare else None
        if packed is None:
            try:
                packed = cloudpickle.dumps(call)
            except Exception:  # noqa: BLE001 - a class may refuse in any way; Ray has its own and says why
                return None
            if bare:
                self._packed[key] = packed
        return packed if len(packed) <= SHARED_BYTES else None

    def _send(self, packed: bytes) -> Answer | None:
        try:
            if self._socket is None:
                self._socket = knock(self._door, LINE, _CONNECT_S)
                weakref.finalize(self, self._socket.close)
            if not self._there:
                self._stay, self._there = self._stay + 1, True
                self._task = self._attend(self._stay)
            self._socket.sendall(CALL.pack(len(packed), 0) + packed)
        except OSError:  # the process is gone, which a task will tell, or its node lets nobody in
            self._broken = True
            return None
        self._last = Answer(self._socket, self._task, functools.partial(self.left, self._stay))
        return self._last


class Answer:
    """The answer to one call: a reference for `RayTransport.wait` and `fetch`."""

    def __init__(
        self, connection: socket.socket, task: Any = None, left: Callable[[], None] = lambda: None
    ) -> None:
        """`task`, by which the process attends, knows more when the line breaks; `left` is told
        when it leaves.
        """
        self.task, self._left = task, left
        self.broken = False
        self.failure: str | None = None
        self.header = b""
        self._socket = connection
        self._lock = threading.Lock()
        self._got = bytearray()
        self._did: int | None = None
        self.here = False

    @property
    def payload(self) -> Payload:
        """A reference to what the method returned."""
        return Payload(self)

    def arrives(self, seconds: float) -> bool:
        """Wait that long for it; a broken line counts as an answer."""
        if self.here:
            return True
        until = time.monotonic() + seconds
        if not self._lock.acquire(timeout=seconds):
            return False
        try:
            while not self.here:
                try:
                    got = os.read(
                        self._socket.fileno(), PIECE_BYTES
                    )  # not `recv`: that waits first, then reads
                except BlockingIOError:
                    if not _readable(self._socket, until - time.monotonic()):
                        return False
                except OSError:
                    self._take(b"")
                else:
                    self._take(got)
            return True
        finally:
            self._lock.release()

    def load(self) -> Any:
        """The payload that came with it."""
        return pickle.loads(self._body)

    @property
    def in_store(self) -> bool:
        """Whether the payload is what `task` returns."""
        return self._did == LEFT

    def _take(self, got: bytes) -> None:
        if not got:
            self.broken = self.here = True
        self._got += got
        if len(self._got) < ANSWER.size:
            return
        header_bytes, payload_bytes, did = ANSWER.unpack_from(self._got)
        if len(self._got) < ANSWER.size + header_bytes + payload_bytes:
            return
        self.header = bytes(self._got[ANSWER.size : ANSWER.size + header_bytes])
        self._body = memoryview(self._got)[ANSWER.size + header_bytes :]
        self._did = did
        if did == FAILED:
            self.failure = self.header.decode()
        if did == LEFT:
            self._left()
        self.here = True


def _readable(connection: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return seconds > 0 and bool(poll.poll(seconds * 1000))


@dataclass(frozen=True)
class Payload:
    """A reference to what the method of an answer returned."""

    answer: Answer


def call_past_queue(door: Door, call: Call) -> Answer:
    """The answer to a call that runs at once. OSError: the process does not open its door."""
    packed = cloudpickle.dumps(call)
    connection = knock(door, PAST_QUEUE, _CONNECT_S)
    connection.sendall(CALL.pack(len(packed), 0) + packed)
    answer = Answer(connection)
    weakref.finalize(answer, connection.close)
    return answer
