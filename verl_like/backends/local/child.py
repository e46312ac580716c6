"""The program of a child process of the local backend, and the messages on its pipe.

A reader thread takes messages off the pipe: calls go to the main thread's queue; a request for
stacks or progress, and a call that goes past the queue, are answered at once. When the driver is
gone the pipe closes and the process ends, in the middle of a call too.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch

from verl_like.calls.progress import PIPE, REQUEST
from verl_like.errors import WorkerError, cannot_travel
from verl_like.process.host import WorkerHost


def send(
    connection: Connection, lock: threading.Lock, number: int, method: str, content: Any
) -> None:
    """One message: number and method, the pickled content, then its out-of-band buffers."""
    buffers: list[pickle.PickleBuffer] = []
    body = cloudpickle.dumps(content, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    with lock:
        connection.send((number, method, [view.nbytes for view in views]))
        connection.send_bytes(body)
        for view in views:
            if view.nbytes:
                connection.send_bytes(view)


def receive(connection: Connection) -> tuple[int, str, Callable[[], Any]]:
    """The counterpart of `send`; the content is unpickled by whoever can answer for it.

    EOFError: nobody is there.
    """
    number, method, sizes = connection.recv()
    body = connection.recv_bytes()
    buffers = []
    for size in sizes:
        buffer = bytearray(size)
        if size:
            connection.recv_bytes_into(buffer)
        buffers.append(buffer)
    return number, method, lambda: pickle.loads(body, buffers=buffers)


class _Program:
    """Serves one driver until it goes away."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self._host: WorkerHost | None = None
        self._calls: queue.Queue[tuple[int, str, Callable[[], Any]]] = queue.Queue()

    def run(self) -> None:
        """Answer calls in this thread, in turn; a thread reads the pipe."""
        threading.Thread(target=self._read, name=PIPE, daemon=True).start()
        while True:
            self._answer(*self._calls.get())

    def _read(self) -> None:
        try:
            while True:
                number, method, load = receive(self._connection)
                if method == "stacks":
                    self._send(number, "answer", self._host.stacks() if self._host else "starting")
                elif method in ("progress", "past_queue"):
                    call = number, "call" if method == "past_queue" else method, load
                    threading.Thread(
                        target=self._answer, args=call, name=REQUEST, daemon=True
                    ).start()
                else:
                    self._calls.put((number, method, load))
        except (EOFError, OSError):
            os._exit(0)

    def _answer(self, number: int, method: str, load: Callable[[], Any]) -> None:
        try:
            arguments = load()
            result = None
            if method == "host":
                self._host = WorkerHost(*arguments)
            else:
                result = getattr(self._host, method)(*arguments)
            self._send(number, "answer", result)
        except WorkerError as error:
            self._send(number, "error", str(error))
        except SystemExit:
            raise  # of a call in its turn: the process ends
        except BaseException as error:  # noqa: BLE001 - the process edge: the driver is sent a text
            text = traceback.format_exception_only(error)[-1].strip()
            self._send(number, "error", cannot_travel(text))

    def _send(self, number: int, kind: str, content: Any) -> None:
        send(self._connection, self._sending, number, kind, content)


def main(connection: Connection) -> None:
    """Serve the driver that started this process, which alone ends it.

    A scheduler may send signals to all processes of a job, and a driver then saves first.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    _Program(connection).run()
