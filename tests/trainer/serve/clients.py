"""A client of the protocol in a few lines of httpx, and a server for it in this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from trainer.config.compose import load_config
from trainer.serve.app import open_api
from trainer.serve.bodies import CLASSES, PROTOBUF
from trainer.serve.recipe import SERVE, prepare
from trainer.serve.work_queue import WorkQueue, started

JsonObject = dict[str, Any]
TEXT = [7, 9, 11, 13, 8, 6, 21]
ADAM = {"learning_rate": 1e-2}
Sequences = list[tuple[list[int], list[float], int]]
"""(tokens, log-probs, stop reason) of each sample."""
FIELDS = {"float32": (1, "<f4"), "int64": (2, "<i8")}


def config_of(model: Path, folder: Path, *settings: str, rank: int = 4) -> Any:
    """The configuration of a small server on the CPU."""
    common = [
        f"actor_rollout_ref.model.path={model}",
        f"actor_rollout_ref.model.lora_rank={rank}",
        f"trainer.default_local_dir={folder}",
        "trainer.device=cpu",
        "data.max_prompt_length=32",
        "data.max_response_length=16",
    ]
    config = load_config([*common, *settings], SERVE)
    prepare(config)
    return config


@contextmanager
def served(config: Any, token: str = "", **aliases: str) -> Iterator[tuple[WorkQueue, str]]:
    """Within, a server answers at the URL; its work is done in a thread."""
    with started(config, aliases) as work_queue, open_api(work_queue, "127.0.0.1", 0, token) as url:
        worker = threading.Thread(target=work_queue.run, name="work queue")
        worker.start()
        try:
            yield work_queue, url
        finally:
            work_queue.stop()
            worker.join()


class Client:
    """One session."""

    def __init__(self, url: str, key: str = "tml-any") -> None:
        # calls in this process set and remove variables while httpx would read them
        self.http = httpx.Client(
            base_url=f"{url}/api/v1", headers={"X-API-Key": key}, timeout=60, trust_env=False
        )
        try:
            self.session = self.post("create_session", tags=[], sdk_version="0")["session_id"]
        except FailedError:
            self.http.close()
            raise
        self.samplers = 0

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def post(self, route: str, /, **body: Any) -> JsonObject:
        """The answer of a POST; a status of 400 and more raises its text."""
        return answer_of(self.http.post(route, json=body))

    def get(self, path: str, **params: Any) -> JsonObject:
        return answer_of(self.http.get(path, params=params))

    def result(self, promise: JsonObject) -> Any:
        """The result of a promise; an error raises its text."""
        while True:
            response = self.http.post("retrieve_future", json={"request_id": promise["request_id"]})
            if response.headers["content-type"] == PROTOBUF:
                return response.content
            answer = answer_of(response)
            if "error" in answer:
                raise FailedError(f"{answer['category']}: {answer['error']}")
            if answer.get("type") != "try_again":
                return answer

    def model(self, base: str, seq: int = 0, **lora: Any) -> Model:
        """A new model."""
        body = {"session_id": self.session, "model_seq_id": seq, "base_model": base}
        result = self.result(self.post("create_model", **body, lora_config={"rank": 4, **lora}))
        return Model(self, result["model_id"])

    def load(self, path: str, optimizer: bool, seq: int) -> Model:
        """A new model from a checkpoint."""
        body = {"session_id": self.session, "model_seq_id": seq, "path": path}
        result = self.result(self.post("load_weights", **body, optimizer=optimizer))
        return Model(self, result["model_id"])

    def sampler(self, **source: str) -> str:
        """A new sampler of a base_model or a model_path."""
        self.samplers += 1
        body = {"session_id": self.session, "sampling_session_seq_id": 100 + self.samplers}
        return str(self.post("create_sampling_session", **body, **source)["sampling_session_id"])

    def draw(self, sampler: str, seq: int, ids: Sequence[int], /, **fields: Any) -> Sequences:
        """Sample; return the sequences."""
        return sequences(self.result(self.sample(sampler, seq, ids, **fields)))

    def sample(self, sampler: str, seq: int, ids: Sequence[int], /, **fields: Any) -> JsonObject:
        """Post a sample request."""
        body = {"sampling_session_id": sampler, "seq_id": seq, "num_samples": 1, **fields}
        chunks = [{"type": "encoded_text", "tokens": list(ids)}]
        body.setdefault("sampling_params", {"max_tokens": 8})
        return self.post("asample", **{"prompt": {"chunks": chunks}, **body})


class Model:
    """A client's model, with its numbered requests."""

    def __init__(self, client: Client, name: str) -> None:
        self.client, self.name, self.seq = client, name, 0

    def next(self) -> int:
        self.seq += 1
        return self.seq

    def backward_body(
        self,
        seq: int,
        datums: Sequence[tuple[Sequence[int], Mapping[str, Any]]],
        loss: str,
        forward_only: bool = False,
        **settings: Any,
    ) -> bytes:
        message = CLASSES["ForwardBackwardRequest"](model_id=self.name, seq_id=seq, loss_fn=loss)
        message.forward_only = forward_only
        for name, value in settings.items():
            entry = message.loss_fn_config_v2.add(key=name)
            if isinstance(value, str):
                entry.value.text = value
            else:
                entry.value.number = value
        for tokens, inputs in datums:
            datum = message.data.add()
            # several chunks are joined; a tuple has chunks, of which dicts are images
            for part in tokens if isinstance(tokens, tuple) else (tokens[:1], tokens[1:]):
                chunk = datum.model_input.add()
                if isinstance(part, Mapping):
                    for name, value in part.items():
                        setattr(chunk.image, name, value)
                else:
                    chunk.encoded_text.tokens = np.asarray(part, "<i4").tobytes()
            for name, values in inputs.items():
                kind, dtype = FIELDS["int64" if name == "target_tokens" else "float32"]
                array = np.asarray(values, dtype)
                tensor = datum.loss_fn_inputs.add(key=name).value
                tensor.dense, tensor.dtype = array.tobytes(), kind
                tensor.shape.extend(array.shape)
        body: bytes = message.SerializeToString()
        return body

    def post_backward(self, body: bytes) -> JsonObject:
        headers = {"content-type": PROTOBUF}
        return answer_of(self.client.http.post("forward_backward", content=body, headers=headers))

    def backward(self, datums: Any, loss: str = "cross_entropy", **settings: Any) -> JsonObject:
        """Post a request; return its promise."""
        return self.post_backward(self.backward_body(self.next(), datums, loss, **settings))

    def step(self, **adam: Any) -> JsonObject:
        """Post an optimizer step; return its promise."""
        body = {"model_id": self.name, "seq_id": self.next(), "adam_params": adam}
        return self.client.post("optim_step", **body)

    def train(self, **adam: Any) -> JsonObject:
        """Train one step on `TEXT`; return the metrics."""
        self.client.result(self.backward([datum()]))
        return dict(self.client.result(self.step(**(adam or ADAM)))["metrics"])

    def sampler(self, seq: int) -> str:
        """A new sampler of the current weights."""
        saved = self.save("save_weights_for_sampler", sampling_session_seq_id=seq)
        return str(saved["sampling_session_id"])

    def save(self, kind: str = "save_weights", /, **body: Any) -> JsonObject:
        """Save; return the result."""
        promise = self.client.post(kind, model_id=self.name, seq_id=self.next(), **body)
        return dict(self.client.result(promise))


class FailedError(AssertionError):
    """A status of 400 and more, or a failed request."""


def answer_of(response: httpx.Response) -> JsonObject:
    if response.status_code >= 400:
        raise FailedError(f"{response.status_code}: {response.json()['detail']}")
    return dict(json.loads(response.content))


def outputs(body: bytes) -> tuple[list[list[float]], dict[str, float]]:
    """(log-probs of each datum, metrics) of a training result."""
    message = CLASSES["ForwardBackwardOutput"]()
    message.ParseFromString(body)
    rows = []
    for record in message.loss_fn_outputs:
        tensor = record.fields[0].value
        ends = np.frombuffer(tensor.offsets, "<i8") // 4
        values = np.frombuffer(tensor.data, "<f4")
        shape = [-1, *tensor.trailing_shape]
        for begin, end in zip(ends, ends[1:], strict=False):
            rows.append(values[begin:end].reshape(shape).tolist())
    return rows, {entry.key: entry.value for entry in message.metrics}


def sequences(body: bytes) -> Sequences:
    """Decode the samples of a response."""
    message = CLASSES["SampleResponse"]()
    message.ParseFromString(body)
    return [
        (
            np.frombuffer(s.tokens, "<i4").tolist(),
            np.frombuffer(s.logprobs, "<f4").tolist(),
            s.stop_reason,
        )
        for s in message.sequences
    ]


def prompt_log_probs(body: bytes) -> list[float]:
    message = CLASSES["SampleResponse"]()
    message.ParseFromString(body)
    return list(np.frombuffer(message.prompt_logprobs, "<f4").tolist())


def top_tokens(body: bytes) -> tuple[Any, Any]:
    """The ids of the likeliest tokens and their log-probs, [prompt, k]."""
    message = CLASSES["SampleResponse"]()
    message.ParseFromString(body)
    top = message.topk_prompt_logprobs
    shape = top.length, top.k
    ids = np.frombuffer(top.token_ids, "<i4").reshape(shape)
    return ids, np.frombuffer(top.logprobs, "<f4").reshape(shape)


def datum(tokens: list[int] | None = None, **inputs: Any) -> tuple[list[int], dict[str, Any]]:
    tokens = tokens or TEXT
    return tokens[:-1], {"target_tokens": tokens[1:], **inputs}


def policy_datum(advantage: float = 1.0, **inputs: Any) -> tuple[list[int], dict[str, Any]]:
    count = len(TEXT) - 1
    numbers = {"logprobs": [-3.5] * count, "advantages": [advantage] * count}
    return datum(**numbers, **inputs)
