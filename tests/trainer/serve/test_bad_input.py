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
from trainer.serve.pending import PendingResult
from trainer.serve.wire import CLASSES, PROTOBUF
from trainer.serve.work_queue import WorkQueue
from verl_like.errors import BatchError, LostSamplesError, RolloutError

Server = tuple[WorkQueue, str]
CONNECTIONS = 500
HEAD = "POST /api/v1/{} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n"
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
            connection.sendall(b"TP/1.1\r\nHost: x\r\n\r\n")
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
        monkeypatch.setattr(app, "GAP_S", 0.0)
        for promise in waiting:
            with pytest.raises(FailedError, match="user: seq_id 1 did not arrive within 0 s"):
                healthy.result(promise)
        monkeypatch.setattr(app, "GAP_S", 120.0)
        monkeypatch.setattr(app, "SILENT_S", 0.0)
        sessions = healthy.get("sessions")["sessions"]
        while sessions:
            sessions = healthy.get("sessions")["sessions"]
        monkeypatch.setattr(app, "SILENT_S", 1800.0)
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
