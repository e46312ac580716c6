"""The program of a child process of the local backend:

`python -P -m verl_like.backends.local.child FD`, and the wire to it.

A reader thread takes messages off the pipe: calls go to the main thread's queue; a request for
stacks, and a call that goes past the queue, are answered at once. When the driver is gone the pipe
closes and the process ends, in the middle of a call too.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle


def send(
    connection: Connection, lock: threading.Lock, number: int, method: str, content: Any
) -> None:
    """One message: number and method in the clear, the pickled content, then its out-of-band
    buffers as they are.
    """
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


def main() -> None:
    """Serve one driver until it goes away."""
    connection, lock = Connection(int(sys.argv[1])), threading.Lock()
    sys.path[:] = connection.recv()
    import torch

    from verl_like.errors import WorkerError, cannot_travel
    from verl_like.process.host import WorkerHost

    torch.set_num_threads(1)
    host: list[WorkerHost] = []
    calls: queue.Queue[tuple[int, str, Callable[[], Any]]] = queue.Queue()

    def read() -> None:
        try:
            while True:
                number, method, load = receive(connection)
                if method == "stacks":
                    send(
                        connection, lock, number, "answer", host[0].stacks() if host else "starting"
                    )
                elif method == "past_queue":
                    threading.Thread(
                        target=answer, args=(number, "call", load), daemon=True
                    ).start()
                else:
                    calls.put((number, method, load))
        except (EOFError, OSError):
            os._exit(0)

    def answer(number: int, method: str, load: Callable[[], Any]) -> None:
        try:
            args = load()
            if method == "host":
                host.append(WorkerHost(*args))
                result: Any = None
            else:
                result = getattr(host[0], method)(*args)
            send(connection, lock, number, "answer", result)
        except WorkerError as error:
            send(connection, lock, number, "error", str(error))
        except Exception as error:  # noqa: BLE001 - the process edge: what cannot be read or sent is told as text
            send(
                connection, lock, number, "error", cannot_travel(f"{type(error).__name__}: {error}")
            )

    threading.Thread(target=read, name="pipe", daemon=True).start()
    while True:
        answer(*calls.get())


if __name__ == "__main__":
    main()
