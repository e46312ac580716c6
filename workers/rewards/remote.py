"""Rewards over HTTP: the client that scores samples with a server, and our own server.

`RemoteScorer` has the same interface as `workers.rewards.scorer.Scorer`: it gets samples, and
returns one outcome per sample. It has batches, retries, deadlines and a bearer token. A protocol
defines requests and replies: `samples` is for our own server, `openrlhf` is for OpenRLHF's remote
reward models, and `openai` asks a language model for a verdict.

`verl-like serve-reward` serves a reward function, for rewards with `kind: remote`:

    server = RewardServer(FunctionSpec("rewards.py"), host="127.0.0.1", port=8000)
    server.serve_forever()

A POST of `{"samples": [row, ...]}` to any path returns `{"outcomes": [...]}`, and OpenRLHF's
`{"query", "prompts", "labels"}` returns `{"rewards": [...]}`. The function runs in separate
processes, as in a training run (`workers.rewards.scorer`).
"""

from __future__ import annotations

import hmac
import json
import os
import random
import re
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from verl_like.errors import ConfigError
from verl_like.process.machine import http_url
from workers.config import RewardConfig
from workers.rewards.call import prompt_text
from workers.rewards.outcome import LATE, Sample, ScoreOutcome, read_outcome
from workers.rewards.scorer import FunctionSpec, Scorer

NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
JUDGE_TEMPLATE = """Rate the answer from 0 (wrong) to 10 (perfect). Reply with the number alone.

Question: {prompt}

Answer: {solution_str}"""


@dataclass(frozen=True)
class RemoteProtocol:
    """Builds requests for one kind of server, and reads its replies."""

    request: Callable[[Sequence[Sample], RewardConfig], Any]
    """Returns the request, as a JSON-compatible object."""
    outcomes: Callable[[Any, int], list[ScoreOutcome]]
    """Reads a reply for so many samples; raises KeyError, TypeError or ValueError if it is invalid.
    """
    largest_batch: int | None = None
    """Maximum samples per request; None: `batch_size` of the reward."""


def _samples_request(samples: Sequence[Sample], config: RewardConfig) -> Any:
    """Return the samples with all fields that a local function could read."""
    return {"samples": list(samples)}


def _samples_outcomes(answer: Any, count: int) -> list[ScoreOutcome]:
    """Read each sample's score and other numbers, or its error."""
    rows = _check_count(answer["outcomes"], count)
    return [(None, {}, str(row["error"])) if "error" in row else read_outcome(row) for row in rows]


def _openrlhf_request(samples: Sequence[Sample], config: RewardConfig) -> Any:
    """Return queries (prompts with their responses), prompts and labels."""
    prompts = [prompt_text(sample) for sample in samples]
    return {
        "query": [
            prompt + str(sample["solution_str"])
            for prompt, sample in zip(prompts, samples, strict=True)
        ],
        "prompts": prompts,
        "labels": [sample["ground_truth"] for sample in samples],
    }


def _openrlhf_outcomes(answer: Any, count: int) -> list[ScoreOutcome]:
    """Read one number per sample, and lists of the same length in `extra_logs`."""
    scores = _check_count(answer["rewards"], count)
    extras = {
        name: _check_count(values, count) for name, values in answer.get("extra_logs", {}).items()
    }
    return [
        read_outcome({"score": scores[row], **{name: extras[name][row] for name in extras}})
        for row in range(count)
    ]


def _judge_request(samples: Sequence[Sample], config: RewardConfig) -> Any:
    """Return the filled template as a user message, with greedy decoding."""
    prompt = "Reply with 0."  # without samples, a test of the server (`RemoteScorer.start`)
    for sample in samples:
        fields = {**sample, "prompt": prompt_text(sample)}
        prompt = (config.template or JUDGE_TEMPLATE).format_map(fields)
    message = {"role": "user", "content": prompt}
    return {"model": config.model, "messages": [message], "temperature": 0}


def _judge_outcomes(answer: Any, count: int) -> list[ScoreOutcome]:
    """Read the first number in the completion as the score."""
    reply = str(answer["choices"][0]["message"]["content"])
    if not count:
        return []
    number = NUMBER.search(reply)
    if number is None:
        return [(None, {}, f"the judge's reply has no number: {reply!r:.80}")]
    return [(float(number.group()), {}, None)]


PROTOCOLS = {
    # {"samples": [row, ...]} -> {"outcomes": [{"score": 1.0} or {"error": "..."}]}
    "samples": RemoteProtocol(_samples_request, _samples_outcomes),
    # {"query", "prompts", "labels"} -> {"rewards": [...]}, and optionally "extra_logs"
    "openrlhf": RemoteProtocol(_openrlhf_request, _openrlhf_outcomes),
    # one chat completion per sample
    "openai": RemoteProtocol(_judge_request, _judge_outcomes, largest_batch=1),
}


def as_json(content: Any) -> bytes:
    """Serialize to JSON; numbers and arrays of numpy become numbers and lists."""
    return json.dumps(content, default=_plain, ensure_ascii=True).encode()


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{value!r:.80} in a sample cannot be sent as JSON")


def _check_count(outcomes: Any, count: int) -> list[Any]:
    if not isinstance(outcomes, list) or len(outcomes) != count:
        size = f" of {len(outcomes)}" if isinstance(outcomes, list) else ""
        raise ValueError(
            f"expected a list of {count} outcomes, one per sample, got a "
            f"{type(outcomes).__name__}{size}"
        )
    return outcomes


MAX_CONCURRENT = 8
"""Maximum number of concurrent requests."""
FIRST_WAIT_S = 0.25
"""Seconds before the first retry, ±50 %; they double each time, up to `LONGEST_WAIT_S`."""
LONGEST_WAIT_S = 8.0
LONGEST_ANSWER = 64 * 2**20
"""Replies with more bytes are rejected."""
WORTH_A_RETRY = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which a retry may succeed."""


class RewardServerError(Exception):
    """Raised with the reason if a request fails permanently."""


class RemoteScorer:
    """Client of a reward server."""

    def __init__(self, config: RewardConfig, batch_deadline: float):
        self._config, self._batch_deadline = config, batch_deadline
        self._protocol = PROTOCOLS[config.protocol]
        self._token = _token(config.token_env)
        self._random = random.Random(0)  # varies the waits between retries
        self._threads = ThreadPoolExecutor(MAX_CONCURRENT, thread_name_prefix="remote reward")
        self._given_up = threading.Event()

    def start(self) -> None:
        """Test the server with a request without samples; raise if it does not work."""
        try:
            self._ask([], time.monotonic() + self._config.timeout_s)
        except (RewardServerError, TimeoutError) as err:
            raise ConfigError(
                f"reward {self._config.name!r}: the test request to the reward server "
                f"{self._config.url} failed: {err}. Check that the server is running and that "
                "`url`, `protocol` and `token_env` match it."
            ) from err

    def score(self, samples: Sequence[Sample]) -> list[ScoreOutcome]:
        """Return one outcome per sample; all samples of a failed request have its error."""
        end = time.monotonic() + self._batch_deadline
        size = self._protocol.largest_batch or self._config.batch_size
        parts = [samples[start : start + size] for start in range(0, len(samples), size)]
        answers = self._threads.map(lambda part: self._outcomes(part, end), parts)
        return [outcome for part in answers for outcome in part]

    def give_up(self) -> None:
        """Cancel requests that wait, and stop retrying."""
        self._given_up.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def stop(self) -> None:
        """Stop making requests."""
        self.give_up()

    def _outcomes(self, samples: Sequence[Sample], end: float) -> list[ScoreOutcome]:
        try:
            return self._ask(samples, end)
        except TimeoutError:
            return [(None, {}, LATE)] * len(samples)
        except RewardServerError as err:
            return [(None, {}, str(err))] * len(samples)

    def _ask(self, samples: Sequence[Sample], end: float) -> list[ScoreOutcome]:
        """Request the scores of one batch; retry after temporary errors, with growing waits."""
        body = as_json(self._protocol.request(samples, self._config))
        wait = FIRST_WAIT_S
        for attempt in range(self._config.retries + 1):
            try:
                return self._protocol.outcomes(self._post(body, end), len(samples))
            except _TemporaryError as err:
                if attempt == self._config.retries:
                    tries = "" if attempt == 0 else f" {attempt + 1} times"
                    raise RewardServerError(
                        f"the request to {self._config.url} failed{tries}: {err}"
                    ) from err
                pause = wait * self._random.uniform(0.5, 1.5)
                if time.monotonic() + pause >= end:
                    raise TimeoutError(
                        f"{err}; timeout_s={self._config.timeout_s:g} leaves no time for a retry"
                    ) from err
            except (KeyError, TypeError, ValueError) as err:
                raise RewardServerError(
                    f"{self._config.url} returned an invalid reply: {err}"
                ) from err

            if self._given_up.wait(pause):
                raise TimeoutError(f"the request to {self._config.url} was cancelled")
            wait = min(2 * wait, LONGEST_WAIT_S)
        raise AssertionError("the last attempt returns or raises")

    def _post(self, body: bytes, end: float) -> Any:
        """Return the server's reply to one request as parsed JSON."""
        patience = min(self._config.timeout_s, end - time.monotonic())
        if patience <= 0:
            raise TimeoutError(
                f"the batch's timeout passed before a request to {self._config.url} was sent"
            )

        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(self._config.url, body, headers)
        try:
            with _OPENER.open(request, timeout=patience) as response:
                answer = response.read(LONGEST_ANSWER + 1)
        except urllib.error.HTTPError as err:
            problem = f"status {err.code}: {err.read(300).decode('utf-8', 'replace').strip()}"
            if err.code in WORTH_A_RETRY:
                raise _TemporaryError(problem) from err
            raise RewardServerError(f"{self._config.url} returned {problem}") from err
        except OSError as err:  # refused, reset or too slow, including urllib's errors
            raise _TemporaryError(str(getattr(err, "reason", err)) or type(err).__name__) from err

        if len(answer) > LONGEST_ANSWER:
            raise RewardServerError(
                f"{self._config.url} returned more than {LONGEST_ANSWER // 2**20} MiB. Set a "
                "smaller batch_size."
            )
        return json.loads(answer)


class _TemporaryError(Exception):
    """Raised if a request fails but a retry may succeed."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Rejects redirects, because the bearer token must not reach another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def check_url(url: str, name: str) -> None:
    """Reject an invalid server address; the error has the reward's name."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(
            f"reward {name!r}: url={url!r} does not have the form http://HOST:PORT/PATH."
        )


def _token(variable: str) -> str:
    if not variable:
        return ""
    if not os.environ.get(variable):
        raise ConfigError(
            f"token_env={variable}: the environment variable {variable} is not set, or is empty."
        )
    return os.environ[variable]


LONGEST_REQUEST = 256 * 2**20
"""Requests with more bytes are rejected."""
MAX_DROPPED_BYTES = 65536
"""Maximum bytes of an unauthorized request that are read and dropped."""
CLIENT_TIMEOUT_S = 60.0
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

    def score(self, samples: list[Sample]) -> list[ScoreOutcome]:
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
    timeout = CLIENT_TIMEOUT_S
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
                    self.rfile.read(min(int(length), MAX_DROPPED_BYTES))
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


def as_answer(content: dict[str, Any], outcomes: list[ScoreOutcome]) -> dict[str, Any]:
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
