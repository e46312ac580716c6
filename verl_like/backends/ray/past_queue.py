"""Calls that go past the queue of a process: requests on its side channel, and their answers.

    calls = PastQueue(endpoint)
    answer = calls.make(call)       # a `Future`; any thread may call, however many are under way

A connection is used again once its answer has come. Each has a thread of its own, which waits for
answers: to start one, and to connect, would take longer than most of these calls.
"""

from __future__ import annotations

import pickle
import threading
from collections import deque
from concurrent.futures import Future

import cloudpickle

from verl_like.backends.ray import side_channel
from verl_like.calls.messages import Answer, Call
from verl_like.errors import WorkerDiedError, WorkerError, cannot_travel

CONNECT_S = 2.0
"""How long a worker process may take to accept a connection."""


class PastQueue:
    """Such calls to one process."""

    def __init__(self, endpoint: side_channel.Endpoint) -> None:
        """Nothing is connected yet."""
        self._endpoint = endpoint
        self._idle: deque[_Connection] = deque()

    def make(self, call: Call) -> Future[Answer]:
        """Send it; the future gets the answer, or what became of it."""
        body = cloudpickle.dumps(call)
        answer = Future[Answer]()
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread has taken it
                break
            if connection.send(body, answer):
                return answer
        try:
            if not _Connection(self._endpoint, self._idle).send(body, answer):
                raise ConnectionError("it closes connections")
        except OSError as error:
            gone = f"the worker process is gone: its side channel does not answer ({error})"
            answer.set_exception(WorkerDiedError(gone))
        return answer


class _Connection:
    """One connection, for one call at a time; it goes to `idle` when that is answered."""

    def __init__(self, endpoint: side_channel.Endpoint, idle: deque[_Connection]) -> None:
        self._socket = side_channel.connect(endpoint, CONNECT_S)
        self._socket.settimeout(None)
        self._idle = idle
        self._answer: Future[Answer] | None = None
        self._is_open = True
        self._lock = threading.Lock()
        threading.Thread(target=self._read, name="past the queue", daemon=True).start()

    def send(self, body: bytes, answer: Future[Answer]) -> bool:
        """Send a call, unless the connection has been closed at the other end."""
        with self._lock:
            if not self._is_open:
                return False
            self._answer = answer
        try:
            side_channel.send(self._socket, side_channel.CALL, body)
        except OSError:
            with self._lock:
                is_ours, self._answer = self._answer is answer, None
            return not is_ours  # else the reading thread has seen it, and said so
        return True

    def _read(self) -> None:
        """Hand in answer after answer, until the other end closes."""
        while True:
            reply, error = b"", None
            try:
                reply = side_channel.next_reply(self._socket)
            except WorkerError as failure:
                error = failure
            except OSError:
                self._close()
                return
            with self._lock:
                answer, self._answer = self._answer, None
            self._idle.append(self)
            if answer is not None:
                _settle(answer, reply, error)

    def _close(self) -> None:
        with self._lock:
            self._is_open = False
            answer, self._answer = self._answer, None
        self._socket.close()
        if answer is not None:
            gone = "the worker process is gone: it broke off while it made the call"
            answer.set_exception(WorkerDiedError(gone))


def _settle(answer: Future[Answer], reply: bytes, error: WorkerError | None) -> None:
    if error is None:
        try:
            answer.set_result(pickle.loads(reply))
            return
        except Exception as failure:  # noqa: BLE001 - whatever a class does when it is unpickled
            error = WorkerError(cannot_travel(f"{type(failure).__name__}: {failure}"))
    answer.set_exception(error)
