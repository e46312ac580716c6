"""Run a server: the API in its own thread, and the `WorkQueue` in the main thread."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn

from trainer.serve.app import Api
from trainer.serve.work_queue import WorkQueue, started
from verl_like.process.machine import http_url

SWITCH_S = 0.001
"""Python's thread switch interval while the server runs; the default is 5 ms."""
KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open; clients pause less between requests."""


@contextmanager
def open_api(work_queue: WorkQueue, host: str, port: int, token: str) -> Iterator[str]:
    """Context in which clients can reach the server at the returned URL."""
    api = Api(work_queue, token)
    settings = uvicorn.Config(
        api.app(),
        host,
        port,
        log_level="warning",
        lifespan="off",
        timeout_graceful_shutdown=2,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    listener = settings.bind_socket()
    # connections inherit this; otherwise small responses wait 40 ms for the client's ACK
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.listen(settings.backlog)  # so that clients may connect before the thread serves
    server = uvicorn.Server(settings)

    async def serve() -> None:
        janitor = asyncio.create_task(api.janitor())
        try:
            await server.serve([listener])
        finally:
            janitor.cancel()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), name="api", daemon=True)
    thread.start()
    try:
        yield http_url(host, listener.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def serve(config: Any, host: str, port: int, token: str, aliases: Mapping[str, str]) -> None:
    """Serve until SIGINT or SIGTERM."""
    sys.setswitchinterval(SWITCH_S)
    with started(config, aliases) as work_queue, open_api(work_queue, host, port, token) as url:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: work_queue.stop())
        kind = "adapters" if work_queue.ops.trained["actor"].model.lora_rank else "all weights"
        print(f"{work_queue.base_model} ({kind}) answers at {url}", flush=True)
        if work_queue.notice:
            print(f"note: {work_queue.notice}", flush=True)
        work_queue.run()
        print(f"stopped; checkpoints are in {work_queue.checkpoints.folder}", flush=True)
