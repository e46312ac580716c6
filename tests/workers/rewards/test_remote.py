"""A reward server gives the numbers of its function in process; failures have error texts."""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from verl_like.errors import ConfigError
from workers.config import RewardConfig
from workers.rewards import remote
from workers.rewards.remote import RemoteScorer, RewardServer, check_url, read_samples
from workers.rewards.scorer import FunctionSpec, Scorer

FUNCTION = """
def score(solution_str, ground_truth, extra_info):
    if ground_truth == "raise":
        raise RuntimeError("no such answer")
    return {"score": len(solution_str) / 7 + extra_info["bonus"], "length": len(solution_str)}
"""


def sample(text: str, truth: str = "x", **extra: Any) -> dict[str, Any]:
    return {
        "data_source": "s",
        "solution_str": text,
        "ground_truth": truth,
        "extra_info": {"bonus": 0.1, "ids": np.arange(2), **extra},
        "raw_prompt": [{"role": "user", "content": "Say it."}],
        "uid": "0-0",
        "num_tokens": 3,
    }


SAMPLES = [sample("a"), sample("bcd \ud800 \u2028 é"), sample("e", "raise"), sample("fg" * 40)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> FunctionSpec:
    path = tmp_path_factory.mktemp("server") / "served.py"
    path.write_text(FUNCTION, encoding="utf-8")
    return FunctionSpec(str(path), "score")


@pytest.fixture(scope="module")
def served(spec: FunctionSpec) -> Iterator[RewardServer]:
    server = RewardServer(spec, token="secret")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., RemoteScorer]]:
    monkeypatch.setenv("OUR_TOKEN", "secret")
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 0.001)
    scorers = []

    def make(url: str, deadline: float = 30.0, **settings: Any) -> RemoteScorer:
        settings = {"token_env": "OUR_TOKEN", **settings}
        scorers.append(RemoteScorer(RewardConfig(name="judge", url=url, **settings), deadline))
        return scorers[-1]

    yield make
    for scorer in scorers:
        scorer.stop()


Reply = Callable[[int, dict[str, Any]], tuple[int, Any]]
"""(number of the request, its body) -> (status, reply)."""


class Handler(BaseHTTPRequestHandler):
    """Sends the replies of its server's `reply`."""

    server: Any

    def do_POST(self) -> None:
        content = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, reply = self.server.reply(next(self.server.numbers), content)
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "http://127.0.0.1:9/elsewhere")
        self.end_headers()
        self.wfile.write(reply if isinstance(reply, bytes) else json.dumps(reply).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[[Reply], str]]:
    """Return a function that starts a server with the replies of `reply`, and returns its URL."""
    servers: list[Any] = []

    def start(reply: Reply) -> str:
        server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.reply, server.numbers = reply, itertools.count()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_server_gives_the_numbers_of_its_function_in_process(
    spec: FunctionSpec, served: RewardServer, ask: Any
) -> None:
    in_process = Scorer(spec, 30.0)
    try:
        expected = in_process.score(SAMPLES)
    finally:
        in_process.stop()

    scorer = ask(served.url, batch_size=3)
    scorer.start()
    assert scorer.score(SAMPLES) == expected
    assert [score is None for score, _, _ in expected] == [False, False, True, False]
    assert expected[2][2].startswith("RuntimeError: no such answer\n    at ")


def test_a_server_accepts_openrlhfs_protocol(served: RewardServer, ask: Any) -> None:
    scorer = ask(served.url, protocol="openrlhf")
    (outcome,) = scorer.score([sample("abcdefg")])
    assert outcome[0] is None  # the function needs extra_info, which this protocol does not send
    assert "invalid reply" in outcome[2]


def test_openrlhfs_protocol_has_queries_prompts_labels_and_logs(ask: Any, serve: Any) -> None:
    seen = []

    def reply(_: int, content: dict[str, Any]) -> tuple[int, Any]:
        seen.append(content)
        scores = [float(len(query)) for query in content["query"]]
        return 200, {"rewards": scores, "extra_logs": {"half": [score / 2 for score in scores]}}

    outcomes = ask(serve(reply), protocol="openrlhf").score([sample("abc", "t"), sample("")])
    assert seen == [
        {"query": ["Say it.abc", "Say it."], "prompts": ["Say it."] * 2, "labels": ["t", "x"]}
    ]
    assert outcomes == [(10.0, {"half": 5.0}, None), (7.0, {"half": 3.5}, None)]


def test_a_judges_number_for_the_template_is_the_score(ask: Any, serve: Any) -> None:
    seen = []

    def reply(_: int, content: dict[str, Any]) -> tuple[int, Any]:
        question = content["messages"][0]["content"]
        seen.append((content["model"], question))
        verdict = "I cannot say." if "b" in question else "Score: 7.5 of 10"
        return 200, {"choices": [{"message": {"content": verdict}}]}

    scorer = ask(
        serve(reply), protocol="openai", model="judge-1", template="{prompt}|{solution_str}"
    )
    outcomes = scorer.score([sample("a"), sample("b")])
    assert sorted(seen) == [("judge-1", "Say it.|a"), ("judge-1", "Say it.|b")]
    in_parts = [{"role": "user", "content": [{"type": "text", "text": "Say it."}]}]
    scorer.score([sample("c") | {"raw_prompt": in_parts}])
    assert seen[-1] == ("judge-1", "Say it.|c")
    assert outcomes[0] == (7.5, {}, None)
    assert outcomes[1] == (None, {}, "the judge's reply has no number: 'I cannot say.'")


@pytest.mark.parametrize("status", [429, 503])
def test_a_request_with_a_temporary_error_is_retried(ask: Any, serve: Any, status: int) -> None:
    def reply(number: int, _: Any) -> tuple[int, Any]:
        return (status, {}) if number < 2 else (200, {"outcomes": [{"score": 1}]})

    assert ask(serve(reply), retries=2).score([sample("a")]) == [(1.0, {}, None)]


@pytest.mark.parametrize(
    ("status", "body", "words", "num_requests"),
    [
        (500, {"a": 1}, 'the request to URL failed 3 times: status 500: {"a": 1}', 3),
        (401, {}, "status 401", 1),
        (302, {}, "status 302", 1),
        (
            200,
            {"outcomes": []},
            "expected a list of 1 outcomes, one per sample, got a list of 0",
            1,
        ),
        (200, {"scores": [1]}, "an invalid reply: 'outcomes'", 1),
        (200, b"<html>", "an invalid reply", 1),
        (200, {"outcomes": [{"score": "high"}]}, "returned {'score': 'high'}", 1),
    ],
)
def test_only_temporary_errors_are_retried_and_not_forever(
    ask: Any, serve: Any, status: int, body: Any, words: str, num_requests: int
) -> None:
    requests: list[int] = []

    def reply(number: int, _: Any) -> tuple[int, Any]:
        requests.append(number)
        return status, body

    url = serve(reply)
    ((score, _, error),) = ask(url, retries=2).score([sample("a")])
    assert score is None
    assert words in error.replace(url, "URL")
    assert requests == [*range(num_requests)]


def test_the_deadline_of_a_batch_ends_the_retries(ask: Any, serve: Any) -> None:
    scorer = ask(serve(lambda *_: (500, {})), deadline=0.05, retries=1000)
    assert scorer.score([sample("a")])[0][2] == "passed its deadline"


def test_a_server_that_is_down_at_the_start_is_rejected(ask: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"test request to the reward server .* failed: .*failed 2 times"
    ):
        ask("http://127.0.0.1:9/score", retries=1).start()
    with pytest.raises(ConfigError, match="refused; timeout_s=0.4 leaves no time"):
        ask("http://127.0.0.1:9/score", timeout_s=0.4, retries=99).start()


def test_a_wrong_token_is_rejected(served: RewardServer, ask: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("OUR_TOKEN", "guess")
    with pytest.raises(ConfigError, match="status 401: .*bearer token"):
        ask(served.url).start()


def test_an_ipv6_address_is_served(spec: FunctionSpec, ask: Any) -> None:
    with RewardServer(spec, host="::1", token="secret") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert server.url.startswith("http://[::1]:")
        ask(server.url).start()
        server.shutdown()


def test_a_token_that_is_not_set_is_named(ask: Any) -> None:
    with pytest.raises(ConfigError, match="token_env=NO_SUCH_TOKEN"):
        ask("http://127.0.0.1:9/", token_env="NO_SUCH_TOKEN")


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://host/x", "http:///x"])
def test_an_invalid_url_is_rejected(url: str) -> None:
    with pytest.raises(ConfigError, match="reward 'judge': url="):
        check_url(url, "judge")


def test_a_sample_that_json_cannot_hold_is_named(ask: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent as JSON"):
        ask("http://127.0.0.1:9/").score([sample("a", extra=object())])


def test_the_token_is_checked_before_the_body_is_read(served: RewardServer) -> None:
    """A client without the token gets a response before it has sent its body."""
    with socket.create_connection(served.server_address[:2], timeout=10) as client:
        client.sendall(b"POST /score HTTP/1.1\r\nContent-Length: 1000\r\n\r\n")
        assert client.recv(64).startswith(b"HTTP/1.1 401 ")


def test_a_connection_with_a_wrong_token_is_closed(served: RewardServer) -> None:
    with socket.create_connection(served.server_address[:2], timeout=10) as client:
        client.sendall(b"POST /score HTTP/1.1\r\nContent-Length: 4\r\n\r\nbody" * 2)
        answer = b"".join(iter(lambda: client.recv(4096), b""))
    assert answer.count(b"HTTP/1.1 401 ") == 1


def test_scores_have_the_status_200(served: RewardServer) -> None:
    import urllib.request

    headers = {"Authorization": "Bearer secret"}
    request = urllib.request.Request(served.url, b'{"samples": []}', headers)
    with urllib.request.urlopen(request, timeout=10) as reply:
        assert reply.status == 200


def test_requests_in_both_formats_have_samples() -> None:
    row = {"data_source": "s", "extra_info": {"bonus": 1}}
    plain, other = read_samples({"samples": [{"solution_str": "a"}, row]})
    assert plain == {"solution_str": "a", "data_source": "", "extra_info": {}}
    assert other == row
    queries = {"query": ["pa", "qb"], "prompts": ["p", "q"]}
    labeled = read_samples({**queries, "labels": ["x", "y"]})
    assert [entry["solution_str"] for entry in labeled] == ["a", "b"]
    assert [entry["ground_truth"] for entry in labeled] == ["x", "y"]
    assert [entry["ground_truth"] for entry in read_samples(queries)] == [None, None]


@pytest.mark.parametrize(
    "body", [b"[]", b"{", b'{"query": 3}', b'{"query": [3]}', b'{"samples": [1]}', b"[" * 100_000]
)
def test_a_request_without_samples_is_rejected(served: RewardServer, body: bytes) -> None:
    import urllib.error
    import urllib.request

    request = urllib.request.Request(served.url, body, {"Authorization": "Bearer secret"})
    with pytest.raises(urllib.error.HTTPError, match="400"):
        urllib.request.urlopen(request)


def test_giving_up_ends_the_retries(ask: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "FIRST_WAIT_S", 60.0)
    is_requested = threading.Event()

    def reply(*_: Any) -> tuple[int, Any]:
        is_requested.set()
        return 503, {}

    scorer = ask(serve(reply), deadline=120.0, retries=3)
    outcomes: list[Any] = []
    scoring = threading.Thread(target=lambda: outcomes.extend(scorer.score(SAMPLES)))
    scoring.start()
    assert is_requested.wait(10.0)
    scorer.give_up()
    scoring.join(10.0)
    assert not scoring.is_alive()
    assert [score for score, _, _ in outcomes] == [None] * len(SAMPLES)
