"""A real S3 server on loopback (moto's), and a proxy that slows down or cuts its connections."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.request import Request, urlopen

import pytest

BUCKET = "bucket"


class Proxy:
    """Forwards connections to a port; `bytes_per_s` limits them, and `is_cut` ends them."""

    def __init__(self, port: int) -> None:
        self.bytes_per_s: float | None = None
        self.is_cut = False
        self.cut_after: int | None = None
        """Number of bytes to the server after which connections are cut."""
        self.num_sent = 0
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.is_cut:
                    client.close()
                    continue
                server = socket.create_connection(self._target)
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._copy, args=(*pair, client), daemon=True).start()

    def _copy(self, source: socket.socket, to: socket.socket, client: socket.socket) -> None:
        with suppress(OSError), source, to:
            while data := source.recv(1 << 16):
                if source is client:
                    self.num_sent += len(data)
                    if self.cut_after is not None and self.num_sent > self.cut_after:
                        self.is_cut = True
                if self.is_cut:
                    return
                if self.bytes_per_s is not None:
                    time.sleep(len(data) / self.bytes_per_s)
                to.sendall(data)


@contextmanager
def s3_through_proxy(patch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Start an S3 server with a bucket, and let s3fs reach it through the proxy."""
    import boto3
    import fsspec
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    urlopen(Request(f"http://127.0.0.1:{port}/moto-api/reset", method="POST")).close()
    proxy = Proxy(port)
    patch.setenv("AWS_ACCESS_KEY_ID", "test")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    retries = {"retries": {"max_attempts": 1}, "connect_timeout": 2, "read_timeout": 20}
    settings = {"endpoint_url": f"http://127.0.0.1:{proxy.port}", "config_kwargs": retries}
    patch.setattr("s3fs.S3FileSystem.retries", 1)
    patch.setitem(fsspec.config.conf, "s3", json.loads(json.dumps(settings)))
    boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}").create_bucket(Bucket=BUCKET)
    try:
        yield proxy
    finally:
        proxy.close()
        server.stop()
        fsspec.get_filesystem_class("s3").clear_instance_cache()
