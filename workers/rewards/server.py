"""A reward function as an HTTP server (`verl-like serve-reward`), for rewards with `kind: remote`.

    server = RewardServer(FunctionSpec("rewards.py"), host="127.0.0.1", port=8000)
    server.serve_forever()

A POST of `{"samples": [row, ...]}` to any path returns `{"outcomes": [...]}`, and OpenRLHF's
`{"query", "prompts", "labels"}` returns `{"rewards": [...]}`. The function runs in separate
processes, as in a training run (`workers.rewards.scorer`).
"""

from __future__ import annotations

import hmac
import json
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from verl_like.process.machine import http_url
from workers.rewards.outcome import Outcome, Sample
from workers.rewards.remote import as_json
from workers.rewards.scorer import FunctionSpec, Scorer

LONGEST_REQUEST = 256 * 2**20
"""Requests with more bytes are rejected."""
MOST_DROPPED = 65536
"""Maximum bytes of an unauthorized request that are read and dropped."""
PATIENCE_S = 60.0
"""Seconds without data from a client after which its connection is closed."""


class RewardServer(ThreadingHTTPServer):
    """Scores posted samples, one batch at a time, because the function's processes are shared."""

    daemon_threads = True

    def __init__(
        self,
        function: FunctionSpec,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str = "",
        batch_deadline: float = 120.0,
    ):
        """Load the function; raise if that fails. Port 0 selects a free port."""
        self.token = token
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._scorer, self._turn = Scorer(function, batch_deadline), threading.Lock()
        try:
            self._scorer.start()
            super().__init__((host, port), _RewardHandler)
        except BaseException:
            self._scorer.stop()
            raise

    @property
    def url(self) -> str:
        """The URL that scores samples, on this machine."""
        host, port = self.server_address[:2]
        return f"{http_url(str(host), port)}/score"

    def score(self, samples: list[Sample]) -> list[Outcome]:
        """Return one outcome per sample."""
        with self._turn:
            return self._scorer.score(samples)

    def server_close(self) -> None:
        """Release the port, and end the function's processes."""
        super().server_close()
        self._scorer.stop()


class _RewardHandler(BaseHTTPRequestHandler):
    """Scores the samples of a POST request."""

    server: RewardServer
    timeout = PATIENCE_S
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:  # noqa: N802 - name in the base class
        """Score the posted samples."""
        length = self.headers.get("Content-Length", "")
        token = self.headers.get("Authorization", "")
        expected = f"Bearer {self.server.token}"
        if self.server.token and not hmac.compare_digest(token.encode(), expected.encode()):
            self.close_connection = True
            self._answer(401, {"error": "the bearer token is missing or wrong"})
            if length.isdecimal():  # closing a socket with unread bytes could drop the reply
                with suppress(OSError):  # the client is gone
                    self.rfile.read(min(int(length), MOST_DROPPED))
            return
        if not length.isdecimal() or int(length) > LONGEST_REQUEST:
            self.close_connection = True  # unread bytes would be taken for the next request
            limit = f"a request needs a Content-Length of at most {LONGEST_REQUEST} bytes"
            self._answer(413, {"error": limit})
            return

        body = self.rfile.read(int(length))
        try:
            content = json.loads(body)
            samples = read_samples(content)
        except Exception as err:  # noqa: BLE001 - an error of this request only
            self._answer(400, {"error": f"no samples in the request: {err!r:.200}"})
            return
        self._answer(200, as_answer(content, self.server.score(samples)))

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        body = as_json(content)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do nothing, because there are many requests, and they contain the user's data."""


def read_samples(content: dict[str, Any]) -> list[Sample]:
    """Return the samples of a request in either format."""
    if "samples" in content:
        samples = [dict(sample) for sample in content["samples"]]
        for sample in samples:
            sample.setdefault("data_source", "")
            sample.setdefault("extra_info", {})
        return samples

    queries, labels = list(content["query"]), content.get("labels")
    prompts = list(content.get("prompts", [""] * len(queries)))
    truths = list(labels) if labels is not None else [None] * len(queries)
    return [
        {
            "data_source": "",
            "solution_str": query.removeprefix(prompt),
            "ground_truth": truth,
            "extra_info": {},
            "raw_prompt": prompt,
        }
        for query, prompt, truth in zip(queries, prompts, truths, strict=True)
    ]


def as_answer(content: dict[str, Any], outcomes: list[Outcome]) -> dict[str, Any]:
    """Return the reply with these outcomes, in the format of the request."""
    if "samples" in content:
        rows: list[dict[str, Any]] = []
        for score, extras, error in outcomes:
            rows.append({"error": error} if score is None else {"score": score, **extras})
        return {"outcomes": rows}

    names = sorted({name for _, extras, _ in outcomes for name in extras})
    return {
        "rewards": [score for score, _, _ in outcomes],
        "extra_logs": {name: [extras.get(name) for _, extras, _ in outcomes] for name in names},
    }
