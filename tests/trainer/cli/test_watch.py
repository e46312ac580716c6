"""`verl-like watch`: the report of a live run, over HTTP."""

from __future__ import annotations

import json
import re
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from threading import Thread
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from tests import ROOT
from tests.trainer.serve.test_bad_input import FOREIGN
from tests.trainer.tools.report.report_runs import make_run, metrics_of
from trainer.cli.watch import main, server_of
from verl_like.errors import ConfigError


def test_the_page_follows_a_run(tmp_path: Path, figures: None) -> None:
    folder = tmp_path / "run"
    with server_of(folder, 0, 2.5) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"

        with pytest.raises(HTTPError, match="503") as not_begun:
            urlopen(url, timeout=60)
        assert b"is not a folder" in not_begun.value.read()

        make_run(folder, 3)
        page = urlopen(url, timeout=60).read().decode()
        assert re.search(r"steps</span><b>3</b>", page)
        assert "location.reload(); }, 2500" in re.sub(r"\s+", " ", page)
        assert urlopen(url, timeout=60).read().decode() == page

        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics_of(4)) + "\n")
        assert re.search(r"steps</span><b>4</b>", urlopen(url, timeout=60).read().decode())
        server.shutdown()


def test_remote_folders_are_rejected() -> None:
    with pytest.raises(ConfigError, match="watch reads local folders"):
        main(["s3://bucket/run"])


def test_the_pages_of_other_sites_are_rejected(tmp_path: Path, figures: None) -> None:
    make_run(tmp_path / "run", 1)
    with server_of(tmp_path / "run", 0, 2.5) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"
        for headers in FOREIGN:
            with pytest.raises(HTTPError, match="403") as rejected:
                urlopen(Request(url, headers=headers), timeout=60)
            assert b"is not an address of this machine" in rejected.value.read()
        for host in ("localhost", "127.0.0.1:1", "[::1]:8080"):
            headers = {"Host": host, "Origin": f"http://{host}"}
            assert urlopen(Request(url, headers=headers), timeout=60).status == 200
        server.shutdown()


def test_a_closed_tab_does_not_end_the_server(tmp_path: Path, figures: None) -> None:
    make_run(tmp_path / "run", 2)
    command = [sys.executable, "-m", "trainer.cli.main", "watch", str(tmp_path / "run")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--port=0"], cwd=ROOT, **pipes) as watch:
        try:
            line = watch.stdout.readline()
            port = int(re.search(r"127\.0\.0\.1:(\d+)", line)[1])
            for lingers in (0, 1, 0, 1):
                tab = socket.create_connection(("127.0.0.1", port))
                tab.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                tab.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", lingers, 0))
                tab.close()  # before the page is written; a linger time of 0 resets the connection
            page = urlopen(f"http://127.0.0.1:{port}/", timeout=60).read()
        finally:
            watch.terminate()
        assert b"steps</span>" in page
        assert watch.wait(60) == -signal.SIGTERM
        assert watch.stderr.read() == ""
