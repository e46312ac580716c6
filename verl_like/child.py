"""The program of a child process of the local backend: `python -P -m verl_like.child FD`.

A reader thread takes messages off the pipe: calls go to the main thread's queue, a request for stacks is answered past
the queue. When the driver is gone the pipe closes and the process ends.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle


def send(connection: Connection, lock: threading.Lock, message: Any) -> None:
    """One message: the pickle, then its out-of-band buffers as they are."""
    buffers: list[pickle.PickleBuffer] = []
    body = cloudpickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    with lock:
        connection.send((len(body), [view.nbytes for view in views]))
        connection.send_bytes(body)
        for view in views:
            if view.nbytes:
                connection.send_bytes(view)


def receive(connection: Connection) -> Any:
    """The counterpart of `send`. Raises EOFError when the other side is gone."""
    _, sizes = connection.recv()
    body = connection.recv_bytes()
    buffers = []
    for size in sizes:
        buffer = bytearray(size)
        if size:
            connection.recv_bytes_into(buffer)
        buffers.append(buffer)
    return pickle.loads(body, buffers=buffers)


def main() -> None:
    """Serve one driver until it goes away."""
    connection, lock = Connection(int(sys.argv[1])), threading.Lock()
    sys.path[:] = connection.recv()
    import torch

    from verl_like.host import WorkerHost

    torch.set_num_threads(1)
    host: list[WorkerHost] = []
    calls: queue.Queue[tuple[int, str, tuple[Any, ...]]] = queue.Queue()

    def read() -> None:
        try:
            while True:
                number, method, args = receive(connection)
                if method == "stacks":
                    send(connection, lock, (number, host[0].stacks() if host else "starting", None))
                else:
                    calls.put((number, method, args))
        except (EOFError, OSError):
            os._exit(0)

    threading.Thread(target=read, name="pipe", daemon=True).start()
    while True:
        number, method, args = calls.get()
        try:
            if method == "host":
                host.append(WorkerHost(*args))
                result: Any = None
            else:
                result = getattr(host[0], method)(*args)
            send(connection, lock, (number, result, None))
        except Exception as error:  # noqa: BLE001 - the process edge
            send(connection, lock, (number, None, error))


if __name__ == "__main__":
    main()
