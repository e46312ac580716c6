"""The program of a child process of the local backend.

A reader thread takes requests off the pipe: calls go to the main thread's queue, others are
answered at once (`verl_like.backends.rpc`). When the driver is gone the pipe closes and the process
ends, in the middle of a call too.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from multiprocessing.connection import Connection

import torch

from verl_like.backends.rpc import Answering, Load


def main(connection: Connection) -> None:
    """Serve the driver that started this process, which alone ends it.

    A scheduler may send signals to all processes of a job, and a driver then saves first.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)

    calls: queue.Queue[tuple[int, str, Load]] = queue.Queue()
    answering = Answering(connection)

    def read() -> None:
        answering.run(calls.put)
        os._exit(0)

    threading.Thread(target=read, name="pipe", daemon=True).start()
    while True:
        answering.answer(*calls.get())
