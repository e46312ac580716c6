"""Hostile and broken clients get clear errors and do not affect other clients."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from starlette.routing import Route

from tests.trainer.serve.clients import (
    ADAM,
    TEXT,
    Client,
    FailedError,
    Model,
    config_of,
    datum,
    outputs,
    served,
)
from trainer.serve import app
from trainer.serve.app import Api, body_of
from trainer.serve.bodies import CLASSES, PROTOBUF
from trainer.serve.pending import PendingResult
from trainer.serve.work_queue import WorkQueue
from verl_like.errors import BatchError, LostSamplesError, RolloutError

Server = tuple[WorkQueue, str]
CONNECTIONS = 500
HEAD = (
    "POST /api/v1/{} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {}\r\n\r\n"
)
UNFINISHED = f"{HEAD.format('forward_backward', 1000)}half".encode()


@pytest.fixture
def many_files() -> Iterator[None]:
    """Allow this process both ends of all connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def connect(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def train(model: Model) -> Any:
    """Return the results of a step and of the next forward pass."""
    backward, step = model.backward([datum()]), model.step(**ADAM)
    after = model.backward([datum()], forward_only=True)
    return [model.client.result(promise) for promise in (backward, step, after)]


def test_500_idle_connections_do_not_change_training(
    client: Client, server: Server, many_files: None
) -> None:
    alone = train(client.model(server[0].base_model, 1, seed=4))
    connections = [connect(server[1]) for _ in range(CONNECTIONS)]
    try:
        for number, connection in enumerate(connections):
            connection.sendall((UNFINISHED, b"GET /api/v1/healthz HT")[number % 2])
        assert train(client.model(server[0].base_model, 2, seed=4)) == alone
        for connection in connections[::2]:
            connection.close()
        for connection in connections[1::2]:
            connection.sendall(b"TP/1.1\r\nHost: localhost\r\n\r\n")
        for connection in connections[1::2]:
            assert connection.recv(4096).startswith(b"HTTP/1.1 200 OK")
    finally:
        for connection in connections:
            connection.close()


def test_500_requests_at_once_are_all_answered(client: Client, server: Server) -> None:
    sampler = client.sampler(base_model=server[0].base_model)
    body = {
        "sampling_session_id": sampler,
        "prompt": {"chunks": [{"tokens": TEXT}]},
        "sampling_params": {"max_tokens": 1, "seed": 1},
    }
    posts = [json.dumps({**body, "seq_id": number}) for number in range(CONNECTIONS)]
    promises = []
    for begin in range(0, CONNECTIONS, 100):
        connections = [connect(server[1]) for _ in range(100)]
        for connection, post in zip(connections, posts[begin:], strict=False):
            connection.sendall((HEAD.format("asample", len(post)) + post).encode())
        for connection in connections:
            with connection, connection.makefile("rb") as answer:
                promises.append(json.loads(answer.read().partition(b"\r\n\r\n")[2]))
    results = {client.result(promise) for promise in promises}
    assert len(results) == 1, "requests with one seed have one result"


def test_a_client_that_dies_between_chunks_loses_its_session(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "CLEANUP_S", 0.05)
    with (
        served(config_of(tiny_dir / "model", tmp_path)) as (work_queue, url),
        Client(url) as healthy,
    ):
        alone = train(healthy.model(work_queue.base_model, 1, seed=4))
        with Client(url) as dying:
            broken = dying.model(work_queue.base_model)
            chunks = [broken.backward_body(n, [datum()], "cross_entropy") for n in (1, 2, 3)]
            waiting = [broken.post_backward(chunk) for chunk in chunks[1:]]
            connection = connect(url)
            connection.sendall(UNFINISHED)
            connection.close()
        # nobody sends chunk 1
        assert train(healthy.model(work_queue.base_model, 2, seed=4)) == alone
        monkeypatch.setattr(app, "SEQ_ID_TIMEOUT_S", 0.0)
        for promise in waiting:
            with pytest.raises(FailedError, match="user: seq_id 1 did not arrive within 0 s"):
                healthy.result(promise)
        monkeypatch.setattr(app, "SEQ_ID_TIMEOUT_S", 120.0)
        monkeypatch.setattr(app, "SESSION_TIMEOUT_S", 0.0)
        sessions = healthy.get("sessions")["sessions"]
        while sessions:
            sessions = healthy.get("sessions")["sessions"]
        monkeypatch.setattr(app, "SESSION_TIMEOUT_S", 1800.0)
        with pytest.raises(FailedError, match="410: the session has ended"):
            healthy.post("session_heartbeat", session_id=dying.session)
        with Client(url) as late:
            late.model(work_queue.base_model)  # runs after the deletion of states
            assert {*work_queue.ops.states} == {f"{late.session}:train:0"}


def test_damaged_requests_do_not_crash_the_server(
    client: Client, model: Model, server: Server
) -> None:
    alone = train(client.model(server[0].base_model, 1, seed=4))
    body = model.backward_body(1, [datum(), datum(TEXT[:4])], "cross_entropy")
    headers = {"content-type": PROTOBUF}
    for end in range(0, len(body), 3):
        answer = client.http.post("forward_backward", content=body[:end], headers=headers)
        if answer.status_code == 200:  # a message without a loss
            with pytest.raises(FailedError, match="user: the actor has no loss ''"):
                client.result(answer.json())
        else:
            assert answer.status_code in (400, 404), answer.text
            assert answer.json()["detail"]
    random = np.random.default_rng(0)
    for _ in range(100):
        damaged = bytearray(body)
        for place in random.integers(len(body), size=3):
            damaged[place] = random.integers(256)
        content = bytes(damaged)
        answer = client.http.post("forward_backward", content=content, headers=headers)
        assert answer.status_code in (200, 400, 404), answer.text
    assert train(client.model(server[0].base_model, 2, seed=4)) == alone


def test_a_small_body_cannot_allocate_much_memory(model: Model) -> None:
    message = CLASSES["ForwardBackwardRequest"](loss_fn="cross_entropy", seq_id=1)
    message.model_id = model.name
    for _ in range(3):
        added = message.data.add()
        added.model_input.add().encoded_text.tokens = np.asarray(TEXT, "<i4").tobytes()
        for name, dtype in (("target_tokens", 2), ("weights", 1)):
            tensor = added.loss_fn_inputs.add(key=name).value
            tensor.dtype = dtype
            tensor.shape.extend([len(TEXT), 2**24])
            tensor.sparse_csr.crow_indices = np.zeros(len(TEXT) + 1, "<i8").tobytes()
    promise = model.post_backward(message.SerializeToString())
    with pytest.raises(FailedError, match="user: .*entries exceed"):
        model.client.result(promise)


WEIRD: list[Any] = [None, 10**30, 1.5, "\ud800", "../../x", "\0", [{}]]


def test_no_field_of_any_request_breaks_the_server(server: Server) -> None:
    with Client(server[1]) as client:
        model = client.model(server[0].base_model)
        fields = {
            "session_id": client.session,
            "model_id": model.name,
            "sampling_session_id": client.sampler(base_model=server[0].base_model),
        }
        for method, path, handler in Api(server[0], "").table():
            names = body_of(handler).model_fields
            for name in names:
                for value in WEIRD:
                    sent = {key: known for key, known in fields.items() if key in names}
                    content = json.dumps({**sent, name: value})
                    answer = client.http.request(method, path[1:], content=content)
                    assert answer.status_code < 500, (path, name, value, answer.text)


HUGE = [2**63, 2**64, -(2**70), 10**30]
BIG_SAMPLES: list[Any] = [
    lambda n: {"prompt": {"chunks": [{"tokens": [n]}]}},
    lambda n: {"target_prompt_logprobs": {"data": [n] * 6, "shape": [6, 1]}},
    lambda n: {"target_prompt_logprobs": {"data": [7] * 6, "shape": [6, n]}},
    lambda n: {"topk_prompt_logprobs": n},
    lambda n: {"prompt_logprobs_last_n": n, "prompt_logprobs": True},
    lambda n: {"num_samples": n},
    lambda n: {"seq_id": n},
    *(
        lambda n, name=name: {"sampling_params": {name: [n] if name == "stop" else n}}
        for name in ("stop", "top_k", "max_tokens", "seed")
    ),
]


@pytest.mark.parametrize("number", HUGE)
def test_an_integer_beyond_64_bits_is_rejected(client: Client, server: Server, number: int) -> None:
    sampler = client.sampler(base_model=server[0].base_model)
    for fields in BIG_SAMPLES:
        if fields(1).get("sampling_params") == {"seed": 1} and number == 2**63:
            continue  # seeds have no sign
        with pytest.raises(FailedError, match="^(400|user): "):
            client.draw(sampler, 1, TEXT, **fields(number))
    if number != 2**63:
        with pytest.raises(FailedError, match="400: lora_config.seed="):
            client.model(server[0].base_model, 5, seed=number)
    for body in ({"seq_id": number}, {"seq_id": 1, "adam_params": {"beta1": number}}):
        with pytest.raises(FailedError, match="^(400|404): "):
            client.post("optim_step", model_id="x", **body)
    answer = client.http.get("sessions", params={"limit": number})
    assert answer.status_code == 400
    assert client.http.post("optim_step", content=b'{"seq_id": 1%s}' % (b"0" * 5000)).is_error


def test_numbers_that_are_not_json_are_rejected_in_metadata(client: Client) -> None:
    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        content = f'{{"user_metadata": {{"score": [{number}]}}}}'
        answer = client.http.post("create_session", content=content)
        assert answer.status_code == 400, answer.text
        assert "user_metadata" in answer.json()["detail"]


def test_the_result_of_a_request_that_was_never_made_does_not_exist(
    client: Client, model: Model, server: Server
) -> None:
    for number in ("nope", "", f"{client.session}:nope:1", f"{client.session}:request:x"):
        answer = client.http.post("retrieve_future", json={"request_id": number})
        assert answer.status_code == 404, (number, answer.text)
    for content in ({}, {"request_id": None}, {"request_id": 7}, {"request_id": ["a"]}):
        answer = client.http.post("retrieve_future", json=content)
        assert answer.status_code == 400, (content, answer.text)
        assert "request_id" in answer.json()["detail"]
    # a result that is gone keeps the status that the SDK knows
    gone = {"request_id": f"{'0' * 16}:sample:1:request:1"}
    assert client.http.post("retrieve_future", json=gone).status_code == 410


@pytest.mark.parametrize("size", [70 * 10**6, 200 * 10**6])
@pytest.mark.parametrize("key", ["tml-secret", "tml-other"])
def test_a_body_that_is_too_large_gets_an_answer_and_no_reset(
    tiny_dir: Path, tmp_path: Path, size: int, key: str
) -> None:
    config, part = config_of(tiny_dir / "model", tmp_path), b"x" * 2**20
    with served(config, token="tml-secret") as (_, url), connect(url) as connection:
        head = HEAD.format("forward_backward", size).replace("Host", f"X-API-Key: {key}\r\nHost")
        connection.sendall(head.encode())
        for begin in range(0, size, len(part)):
            connection.sendall(part[: size - begin])
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 413" if key == "tml-secret" else b"HTTP/1.1 401")
    assert b"exceeds 67108864 bytes" in answer or key == "tml-other"


FOREIGN = [
    {"Host": "evil.example"},
    {"Host": "evil.example:8000"},
    {"Host": "127.0.0.1.evil.example"},
    {"Host": "[::2]:8000"},
    {"Host": "["},
    {"Origin": "http://evil.example"},
    {"Origin": "https://localhost.evil.example:8000"},
    {"Origin": "null"},
]


def test_a_server_without_a_key_rejects_the_pages_of_other_sites(client: Client) -> None:
    for headers in FOREIGN:
        for method, path in (("GET", "healthz"), ("POST", "create_session"), ("GET", "nothing")):
            answer = client.http.request(method, path, headers=headers)
            assert answer.status_code == 403, (headers, path)
            assert "--token-env" in answer.json()["detail"]
    for host in ("localhost", "localhost:8000", "127.0.0.1:1", "[::1]:8000", "LOCALHOST"):
        headers = {"Host": host, "Origin": f"http://{host}"}
        assert client.http.get("healthz", headers=headers).is_success, host


def test_a_server_with_a_key_answers_under_any_name(tiny_dir: Path, tmp_path: Path) -> None:
    config = config_of(tiny_dir / "model", tmp_path)
    with served(config, token="tml-secret") as (_, url), Client(url, "tml-secret") as client:
        assert client.http.get("healthz", headers={"Host": "gpu.example"}).is_success


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".hidden", "", "a\0", "x" * 129, "%2e%2e"])
def test_a_checkpoint_name_cannot_leave_the_checkpoint_folder(
    model: Model, server: Server, name: str, tmp_path: Path
) -> None:
    client, before = model.client, sorted(server[0].checkpoints.folder.rglob("*"))
    with pytest.raises(FailedError, match="400: .*cannot name a checkpoint|not a checkpoint path"):
        client.load(f"tinker://{model.name}/weights/{name}", False, 9)
    if name:
        for kind in ("save_weights", "save_weights_for_sampler"):
            with pytest.raises(FailedError, match="400: .*cannot name a checkpoint"):
                model.save(kind, path=name)
    quoted = name.replace("/", "%2F").replace("\0", "%00").replace(".", "%2E")
    for path in (f"{model.name}/checkpoints/weights/{quoted}", f"{quoted}/checkpoints"):
        answer = client.http.request("DELETE", f"training_runs/{path}")
        assert answer.status_code in (400, 404)
    assert sorted(server[0].checkpoints.folder.rglob("*")) == before
    # the rejected saves were counted, and the model goes on
    assert outputs(client.result(model.backward([datum()])))


def test_no_route_answers_without_the_key(tiny_dir: Path, tmp_path: Path) -> None:
    config = config_of(tiny_dir / "model", tmp_path)
    with (
        served(config, token="tml-secret") as (work_queue, url),
        httpx.Client(base_url=url) as http,
    ):
        for route in Api(work_queue, "").app().routes:
            assert isinstance(route, Route)
            path = route.path.replace("{path:path}", "x").replace(":path", "")
            for method in (route.methods or set()) - {"HEAD"}:
                for headers in ({}, {"X-API-Key": "tml-other"}, {"X-API-Key": "tml-sécret"}):
                    sent = {name: value.encode() for name, value in headers.items()}
                    answer = http.request(method, path, headers=sent)
                    assert answer.status_code == 401, (method, path)
                    assert "key in X-API-Key is not the key of" in answer.json()["detail"]
        with Client(url, "tml-secret"):
            pass


def test_an_error_has_the_category_of_its_cause() -> None:
    for error, category in (
        (BatchError("no rows"), "user"),
        (RolloutError("no prompt"), "user"),
        (LostSamplesError("rank 0 is gone"), "server"),
        (RuntimeError("no memory"), "server"),
    ):
        pending = PendingResult("s:request:1")
        pending.fail(error)
        response = asyncio.run(pending.wait(1.0))
        assert response is not None
        assert json.loads(response.body) == {"error": str(error), "category": category}
