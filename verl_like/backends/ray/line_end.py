"""The process's end of the driver's line (`verl_like.backends.ray.line`): makes the calls that come
over it.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

import cloudpickle

from verl_like.backends.ray.line import ANSWER, ANSWERED, CALL, FAILED, LEFT, PIECE_BYTES
from verl_like.calls.pack import SHARED_BYTES, num_bytes
from verl_like.calls.transport import Call, Header

_FEW_BYTES = 4096
"""Read at once where a small message is likely: it takes no more memory than that."""


class _Post:
    """Calls and answers on a socket, as the process sees them."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self._got = b""
        self._bare: dict[
            bytes, Call
        ] = {}  # messages that were calls without arguments: they come again

    def next(self, stay: int) -> Call | None:
        """The next call; None when the process shall leave, or nobody is there any more."""
        while True:
            while len(self._got) >= CALL.size:
                size, of_stay = CALL.unpack_from(self._got)
                end = CALL.size + size
                if len(self._got) < end:
                    break
                message, self._got = self._got[:end], self._got[end:]
                if (
                    not size and of_stay >= stay
                ):  # else: it was meant for a stay that ended by itself
                    return None
                if size and (call := self._bare.get(message) or self._read(message)) is not None:
                    return call
            got = self.socket.recv(_FEW_BYTES if not self._got else PIECE_BYTES)
            if not got:
                return None
            self._got += got

    def _read(self, message: bytes) -> Call | None:
        """The call; None, and the driver is told, if it cannot be read here."""
        try:
            call: Call = pickle.loads(memoryview(message)[CALL.size :])
        except Exception as error:  # noqa: BLE001 - whatever a class does when it is unpickled
            self.answer(f"{type(error).__name__}: {error}".encode(), b"", FAILED)
            return None
        if not call.args and not call.kwargs:
            self._bare[message] = call
        return call

    def answer(self, header: bytes, payload: bytes, did: int) -> None:
        """Tell the driver."""
        self.socket.sendall(ANSWER.pack(len(header), len(payload), did) + header + payload)


class LineEnd:
    """The process's end."""

    def __init__(self, run: Callable[[Call, tuple[()]], tuple[Any, Header]]) -> None:
        """`run` makes a call."""
        self._run = run
        self._callers: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()

    def welcome(self, caller: socket.socket) -> None:
        """What the door does with the driver's socket."""
        self._callers.put(caller)

    def attend(self, stay: int) -> Any:
        """Make the calls that come, until told to leave; the result of the last, if it is too large
        for the line.
        """
        if stay == 1:
            self._post = _Post(self._callers.get())
        while (call := self._post.next(stay)) is not None:
            payload, header = self._run(call, ())
            body = b"" if call.silent else _small(payload)
            self._post.answer(header.packed(), body or b"", LEFT if body is None else ANSWERED)
            if body is None:
                return (payload,)  # Ray takes a generator for several results
        return None

    def past_queue(self, caller: socket.socket) -> None:
        """What the door does with a call that is to run at once: a thread makes it and answers."""
        threading.Thread(
            target=self._at_once, args=(_Post(caller),), name="past the queue", daemon=True
        ).start()

    def _at_once(self, post: _Post) -> None:
        with post.socket, contextlib.suppress(OSError):  # the driver may be gone
            call = post.next(0)
            if call is None:
                return
            payload, header = self._run(call, ())
            try:
                body = cloudpickle.dumps(payload)
            except Exception as error:  # noqa: BLE001 - a class may refuse in any way
                post.answer(f"{type(error).__name__}: {error}".encode(), b"", FAILED)
            else:
                post.answer(header.packed(), body, ANSWERED)


def _small(payload: Any) -> bytes | None:
    """A payload for the line; None if it is too large, or has to go Ray's way to travel at all."""
    if num_bytes(payload) >= SHARED_BYTES:
        return None
    try:
        packed = pickle.dumps(payload, protocol=5)
    except Exception:  # noqa: BLE001 - a class may refuse in any way
        return None
    return packed if len(packed) <= SHARED_BYTES else None
