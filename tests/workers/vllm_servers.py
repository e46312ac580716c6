"""vLLM's server in a separate process, and a stand-in with the same protocol."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import torch

from workers.models.folder import read_hf_config
from workers.rollout.base import EngineLimits, SamplingParams
from workers.rollout.vllm.handover import Arrivals
from workers.rollout.vllm.server import serve_command
from workers.rollout.vllm.setup import EXTENSION, VllmSettings, model_identity
from workers.rollout.vllm.worker import NoiseSampler, WorkerExtension

START_S = 300
STEP_S = 0.05
"""Between two tokens: a server draws on while a test does something to what it draws."""


class SlowExtension(WorkerExtension):
    """Samples slowly."""

    def install_sampler(self) -> list[str]:
        methods = super().install_sampler()
        sampler = self.sampler
        draw = NoiseSampler.forward

        def draw_slowly(*args: Any, **kwargs: Any) -> Any:
            time.sleep(STEP_S if sampler.sampling is not None else 0)
            return draw(sampler, *args, **kwargs)

        sampler.forward = draw_slowly
        return methods


@contextmanager
def vllm_server(folder: Path, limits: EngineLimits) -> Iterator[str]:
    """Start the documented command with our extension; return the address."""
    command = serve_command(VllmSettings(str(folder)), limits)
    words = shlex.split(command.replace(EXTENSION, f"{__name__}.SlowExtension"))
    python = words.index("python")
    settings = dict(word.split("=") for word in words[:python])
    on_cpus = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    where = ["--host", "127.0.0.1", "--port", port, "--disable-uvicorn-access-log"]
    process = subprocess.Popen(
        [sys.executable, *words[python + 1 :], *where],
        env=os.environ | on_cpus | settings | {"PYTHONPATH": "."},
        start_new_session=True,
    )
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while True:
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < until, "the server does not start"
            try:
                urlopen(f"{url}/health").close()
                break
            except URLError:
                time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


class StandIn(WorkerExtension):
    """A vLLM rank without a model: token n of a response is the prompt's first, plus n."""

    rank, device = 0, torch.device("cpu")

    def __init__(self, folder: Path, limits: EngineLimits) -> None:
        self.version = "0.32.7"
        self.facts_found = model_identity(read_hf_config(str(folder)).get_text_config()) | {
            "dtype": "float32",
            "quantization": None,
            "async_scheduling": False,
            "max_model_len": limits.prompt_width + limits.response_width,
        }
        self.weights: dict[str, torch.Tensor] = {}
        self.damage: Callable[[], object] = lambda: None
        """Gets at the weights before their hashes are compared."""
        self.tables = NoiseSampler(None, torch.nn.Identity())
        self.calls: list[str] = []
        self.aborted: set[str] = set()
        self.held: set[int] = set()
        """Prompts of which two tokens are drawn, and no more for now."""
        self.dies = False

    def model_identity(self) -> dict[str, Any]:
        return self.facts_found

    def install_sampler(self) -> list[str]:
        return ["UnquantizedLinearMethod"]

    def use_version(self, version: int) -> None:
        self.tables.version = version

    def begin_requests(self, sampling: dict[str, Any], num_rows: int) -> None:
        self.tables.begin(SamplingParams(**sampling), num_rows)

    def sampled_for(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tables.log_probs[rows], self.tables.versions[rows]

    def end_requests(self) -> None:
        self.tables.sampling = None

    def begin_load(self) -> None:
        self._arrivals, self.weights = Arrivals(), {}

    def load_tensors(self, tensors: Any) -> None:
        self.weights |= {name: tensor.clone() for name, tensor in tensors}
        self.damage()

    def finish_load(self) -> Arrivals:
        return self._arrivals

    def draw(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield a stream's lines, token by token."""
        params = body["sampling_params"]
        extra = params["extra_args"]
        name = f"generate-tokens-{body['request_id']}"
        first, made = body["token_ids"][0], extra["made"]
        for step in range(params["max_tokens"]):
            while step == 2 and first in self.held:
                if name in self.aborted:
                    yield {"token_ids": [], "finish_reason": "abort"}
                    return
                time.sleep(0.01)
            token, place = first + made + step, made + step
            self.tables.log_probs[extra["row"], place] = -float(token)
            self.tables.versions[extra["row"], place] = self.tables.version
            is_last = token in params["stop_token_ids"] or step + 1 == params["max_tokens"]
            yield {"token_ids": [token], "finish_reason": "stop" if is_last else None}
            if is_last:
                return
            if self.dies:
                raise ConnectionResetError


@contextmanager
def stand_in_server(
    folder: Path, limits: EngineLimits, host: str = "127.0.0.1"
) -> Iterator[tuple[str, StandIn]]:
    """Return its address, and its one rank."""
    rank = StandIn(folder, limits)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.answer({"version": rank.version} if self.path == "/version" else None)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            rank.calls.append(self.path)
            if self.path == "/inference/v1/generate":
                self.send_response(200)
                self.end_headers()
                for choice in rank.draw(body):
                    self.wfile.write(b"data: %s\n\n" % json.dumps({"choices": [choice]}).encode())
                    self.wfile.flush()
                self.wfile.write(b"data: [DONE]\n\n")
            elif self.path == "/collective_rpc":
                try:
                    self.answer({"results": [getattr(rank, body["method"])(*body["args"])]})
                except ValueError as error:
                    self.send_error(500, explain=str(error))
            elif self.path == "/abort_requests":
                rank.aborted |= set(body["request_ids"])
                self.answer({})
            else:
                self.answer({"success": True})

        def answer(self, content: Any) -> None:
            self.send_response(200)
            self.end_headers()
            if content is not None:
                self.wfile.write(json.dumps(content).encode())

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """Ignore a connection that breaks off on purpose."""

    server = Server((host, 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}", rank
    finally:
        rank.held.clear()
        server.shutdown()
        server.server_close()
