"""A vLLM server as the backend of `rollout.vllm.engine`, over HTTP.

You start the server with the command that `serve_command` returns; most errors about the server
contain it. The server's workers contain this package's `WorkerExtension`, whose sampler draws each
token from the sample's noise, and records log-probs and versions. Prompts and sampled tokens are
exchanged as token ids (`/inference/v1/generate`). While the server's scheduler is paused, weights
are sent to its ranks like those of an actor to a rollout (`workers.weights.channel`).
"""

from __future__ import annotations

import json
import os
import queue
import uuid
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import torch
from torch import Tensor

from verl_like.calls.deadlines import in_daemon
from verl_like.errors import RolloutError, WeightSyncError
from workers.models.folder import read_hf_config
from workers.rollout.base import CollectBudget, EngineLimits
from workers.rollout.vllm.handover import Arrivals
from workers.rollout.vllm.setup import (
    EXTENSION,
    VllmRequest,
    VllmSettings,
    check_tested_version,
    class_options,
    model_identity,
)
from workers.weights.channel import fill_buckets
from workers.weights.connection import Connections

ANSWER_S = 600.0
"""Time limit for one reply of the server, such as the end of a load, and between two tokens."""
LOOK_S = 10.0
"""After this many seconds without a token, the server's health is checked."""
ABORTED_S = 0.1
"""Seconds until an abort is repeated, because the request may have reached the server later."""
BUCKET_BYTES = 16 * 2**20
CHECK_LOG = "Check the server's log, and restart the server."


def serve_command(settings: VllmSettings, limits: EngineLimits) -> str:
    """Return the command that starts the server for this configuration."""
    eager = " --enforce-eager" if settings.device_type == "cpu" else ""
    options = class_options(settings)
    of_class = " --language-model-only" if "language_model_only" in options else ""
    for name in ("override_generation_config", "hf_overrides"):
        if name in options:
            of_class += f" --{name.replace('_', '-')} '{json.dumps(options[name])}'"
    return (
        "VLLM_SERVER_DEV_MODE=1 VLLM_USE_V2_MODEL_RUNNER=0 python -m "
        f"vllm.entrypoints.openai.api_server --model {settings.model_path} --tokens-only "
        f"--no-async-scheduling --load-format dummy --dtype {settings.dtype} --max-model-len "
        f"{limits.prompt_width + limits.response_width} --worker-extension-cls {EXTENSION}"
        f"{of_class}{eager}"
    )


class VllmServer:
    """One vLLM server, used only by this process, with the interface of `InProcessVllm`."""

    def __init__(self, url: str, settings: VllmSettings, limits: EngineLimits) -> None:
        """Connect; reject a server of another version, or with another configuration."""
        self.url, self.remedy = url.rstrip("/"), serve_command(settings, limits)
        self._device = torch.device(settings.device_type)
        self._name = uuid.uuid4().hex
        self._links = Connections(toward=str(urlsplit(url).hostname))
        self._arrived: queue.SimpleQueue[tuple[int, list[int] | Exception]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(limits.max_num_seqs, "vllm server")
        self._streams: dict[int, Future[None]] = {}
        check_tested_version(self._ask("/version")["version"], "vllm", f" at {self.url}")
        ranks = self.call("model_identity")
        self._num_ranks = len(ranks)
        actual, longest = ranks[0], limits.prompt_width + limits.response_width
        expected = model_identity(read_hf_config(settings.model_path).get_text_config()) | {
            "dtype": settings.dtype,
            "quantization": None,
            "async_scheduling": False,
        }
        wrong = [
            f"{name} {actual[name]} instead of {value}"
            for name, value in expected.items()
            if actual[name] != value
        ]
        if actual["max_model_len"] < longest:
            wrong.append(f"max_model_len {actual['max_model_len']}, less than {longest}")
        if wrong:
            raise self._error(f"has {', '.join(wrong)}")

    def close(self) -> None:
        """Do nothing: the server continues to run."""

    def resume(self) -> None:
        """End the pause that `load` started."""
        self._ask("/resume", {})

    def begin(
        self, sampling: dict[str, Any], num_rows: int, requests: Sequence[VllmRequest]
    ) -> None:
        """Add requests; the table of log-probs then has `num_rows` rows."""
        self.call("begin_requests", sampling, num_rows)
        for request in requests:
            number = request.number
            body = {
                "request_id": f"{self._name}-{number}",
                "token_ids": request.token_ids,
                "cache_salt": f"{self._name} {request.cache_salt}",
                "sampling_params": request.params,
                "stream": True,
            }
            self._streams[number] = self._threads.submit(self._stream, number, body)
            self._streams[number].add_done_callback(partial(self._forget, number))

    def _forget(self, number: int, _: Future[None]) -> None:
        self._streams.pop(number, None)

    def _stream(self, number: int, body: dict[str, Any]) -> None:
        """Read the server's stream for a request; queue its tokens, or the error that ends it."""
        reason = None
        try:
            with self._open("/inference/v1/generate", body) as lines:
                for line in lines:
                    if line.startswith(b"data: {"):
                        (choice,) = json.loads(line.removeprefix(b"data: "))["choices"]
                        reason = choice["finish_reason"]
                        self._arrived.put((number, choice["token_ids"]))
            if reason is None:
                raise self._error("closed the connection in the middle of a response", CHECK_LOG)
        except RolloutError as error:
            self._arrived.put((number, error))
        except (OSError, HTTPException, ValueError, KeyError) as error:
            problem = f"lost the connection in a response ({error!r})"
            self._arrived.put((number, self._error(problem, CHECK_LOG)))

    def step(self, budget: CollectBudget) -> Iterator[tuple[int, Sequence[int] | Exception]]:
        """Yield the tokens and errors that have arrived; if none have, wait at most `LOOK_S`."""
        try:
            arrived = [self._arrived.get(timeout=min(LOOK_S, budget.seconds_left))]
        except queue.Empty:
            if not budget.is_over:
                self._ask("/health")
            return
        while not self._arrived.empty():
            arrived.append(self._arrived.get())
        yield from arrived

    def stop(self, numbers: Sequence[int]) -> None:
        """Drop these requests and wait until they end, because others may then get their rows."""
        known = {number: self._streams.get(number) for number in numbers}
        running = {n: stream for n, stream in known.items() if stream and not stream.cancel()}
        while left := {n: stream for n, stream in running.items() if not stream.done()}:
            names = [f"generate-tokens-{self._name}-{number}" for number in left]
            self._ask("/abort_requests", {"request_ids": names})
            wait(left.values(), ABORTED_S)

    def end(self) -> None:
        """Tell the workers that there are no more requests."""
        self.call("end_requests")

    def drop_prefixes(self, of_running: bool) -> bool:
        """Drop cached keys and values; return True if vLLM succeeded."""
        path = f"/reset_prefix_cache?reset_running_requests={str(of_running).lower()}"
        return bool(self._ask(path, {})["success"])

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> list[Arrivals]:
        """Pause the server until `resume`, and send the tensors from this process to its ranks."""
        self._ask("/pause?mode=keep&clear_cache=false", {})
        self.call("begin_load")
        try:
            self._send(tensors)
        finally:
            reports = self.call("finish_load")
        return [Arrivals(**report) for report in reports]

    def _send(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        address, ranks = str(self._links.new_address()), self._num_ranks
        receipt = in_daemon("weight sync: server", self.call, "receive_load", address, ranks)
        try:
            with self._links.sending(address, ranks, self._device) as channel:
                channel.send(fill_buckets(tensors, BUCKET_BYTES, channel.room, channel.watch))
        except WeightSyncError:
            if receipt.done():
                receipt.result()
            raise
        receipt.result()

    def sleep(self) -> None:
        """Do nothing: the server keeps its memory, because nothing else uses its devices."""

    def wake_weights(self) -> None:
        """Do nothing: the server has kept its memory."""

    def wake_cache(self) -> None:
        """Do nothing: the server has kept its memory."""

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `WorkerExtension` in every worker of the server."""
        body = {"method": "over_http", "args": [method, json.dumps(args)]}
        return [json.loads(text) for text in self._ask("/collective_rpc", body)["results"]]

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the server's reply to a GET request, or with a body to a POST request."""
        try:
            with self._open(path, body) as response:
                text = response.read()
            return json.loads(text) if text else None
        except (OSError, HTTPException, ValueError) as error:
            raise self._error(f"does not reply to {path} like a vLLM server ({error!r})") from error

    def _open(self, path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
        """Send a request, and return the open response; raise if the server rejects it."""
        headers = {"Content-Type": "application/json"}
        key = os.environ.get("VLLM_API_KEY")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            response: HTTPResponse = urlopen(
                Request(self.url + path, data, headers), timeout=ANSWER_S
            )
            return response
        except HTTPError as error:
            detail = " ".join(error.read().decode(errors="replace").split())[:500]
            remedy = "Its log has the cause." if error.code >= 500 else ""
            if error.code in (401, 403):
                remedy = "Set VLLM_API_KEY to the server's key."
            problem = f"replies to {path} with {error.code}: {detail}"
            raise self._error(problem, remedy) from error
        except OSError as error:
            raise self._error(f"cannot be reached ({error})") from error

    def _error(self, problem: str, remedy: str = "") -> RolloutError:
        remedy = remedy or f"Start it in an environment that has this package: {self.remedy}"
        return RolloutError(
            f"rollout: the server {self.url} (actor_rollout_ref.rollout.server_urls) {problem}. "
            f"{remedy}"
        )
