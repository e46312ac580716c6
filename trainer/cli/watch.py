"""usage: verl-like watch RUN_DIR [--port 8080] [--every 10]

Serves the report of a run in progress on http://127.0.0.1:PORT. The page loads
itself again and again, and shows the run as far as its files go. Ctrl-C ends
the server, not the run.

  verl-like watch runs/verl_like/ppo

  --port PORT      default: 8080
  --every SECONDS  time between two loads (default: 10)

For a run on another machine: ssh -L 8080:127.0.0.1:8080 HOST, and the same
command there.
"""

from __future__ import annotations

import argparse
import html
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from trainer.tools.report.page import report_html
from trainer.tools.report.read import read_run
from verl_like.errors import ConfigError
from verl_like.files import is_remote
from verl_like.process.machine import foreign_header
from verl_like.terminal import usage_text


def main(arguments: Sequence[str]) -> None:
    """Serve the page until Ctrl-C."""
    parser = argparse.ArgumentParser("verl-like watch", usage_text(__doc__))
    parser.add_argument("run", metavar="RUN_DIR")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--every", type=float, default=10.0)
    options = parser.parse_args(arguments)
    if is_remote(options.run):
        raise ConfigError(f"watch reads local folders, not {options.run}. Use verl-like report.")
    with server_of(options.run, options.port, options.every) as server:
        print(f"{options.run}: http://127.0.0.1:{server.server_port} (Ctrl-C ends)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()


def server_of(folder: str | Path, port: int, every_s: float) -> ThreadingHTTPServer:
    """Return a server of the run's report, which is rendered again after the run has written."""
    metrics, lock = Path(folder) / "metrics.jsonl", Lock()
    rendered: dict[str, tuple[int, bytes]] = {}

    def page() -> bytes:
        with lock:
            size = metrics.stat().st_size if metrics.is_file() else -1
            if "page" not in rendered or rendered["page"][0] != size:
                rendered["page"] = (size, report_html(read_run(folder), every_s))
            return rendered["page"][1]

    class Handler(BaseHTTPRequestHandler):
        def handle(self) -> None:
            with suppress(ConnectionError):  # the tab is closed
                super().handle()

        def do_GET(self) -> None:  # noqa: N802 - the name that http.server calls
            foreign = foreign_header(self.headers.get("Host"), self.headers.get("Origin"))
            try:
                if foreign:
                    text, status = html.escape(f"{foreign}. Use 127.0.0.1.").encode(), 403
                else:
                    text, status = page(), 200
            except ConfigError as error:  # the run has not begun
                refresh = f'<meta http-equiv="refresh" content="{every_s:g}">'
                text, status = f"{refresh}<p>{html.escape(str(error))}</p>".encode(), 503
            self.send_response(status)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Print no line per request."""

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)
