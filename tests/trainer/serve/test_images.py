"""Requests with images: numbers of transformers and of the verbs, samples, and errors in words."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.serve.clients import (
    Client,
    FailedError,
    config_of,
    outputs,
    prompt_log_probs,
    sequences,
    served,
)
from tests.trainer.serve.test_sdk import needs_sdk, run_sdk
from tests.workers.models.vision import picture, write_model
from trainer.data.lm_rows import LMRow, lm_batch
from trainer.groups.worker_groups import WorkerGroups
from trainer.launch import reproducible_arithmetic
from workers.images import image_ref
from workers.models.images import ImageReader
from workers.training.optim import OptimStepSettings

SIZES = ((40, 70), (90, 30), (33, 33))
WIDTHS = ("data.max_prompt_length=160", "data.max_response_length=16")
RATE = 1e-2
Chunks = tuple[Any, ...]


def image(number: int, kind: str = "png", **fields: Any) -> dict[str, Any]:
    buffer = io.BytesIO()
    picture(*SIZES[number], seed=number).save(buffer, format=kind)
    return {"data": buffer.getvalue(), "format": kind, **fields}


class Rows:
    """Rows with 1, 0 and 2 images of unlike sizes: as chunks, as ids, and as references."""

    def __init__(self, folder: Path) -> None:
        self.reader = ImageReader(str(folder))
        ids = self.text("<|user|>Is <|vision_start|>"), self.text("<|vision_end|>it?")
        self.chunks: list[Chunks] = [
            (ids[0], image(0), ids[1]),
            (self.text("<|user|>Is it?"),),
            (ids[0], image(1, "jpeg"), ids[1], ids[0], image(2), ids[1]),
        ]
        self.refs = [
            [image_ref(part["data"]) for part in chunks if isinstance(part, dict)]
            for chunks in self.chunks
        ]
        self.ids = [self.joined(chunks) for chunks in self.chunks]

    def text(self, text: str) -> list[int]:
        ids: list[int] = self.reader.processor.tokenizer(text)["input_ids"]
        return ids

    def joined(self, chunks: Chunks) -> list[int]:
        parts = [
            self.reader.ids_of(image_ref(part["data"])) if isinstance(part, dict) else part
            for part in chunks
        ]
        return [token for part in parts for token in part]

    def datums(self) -> list[tuple[Chunks, dict[str, Any]]]:
        return [
            (chunks, {"target_tokens": [*ids[1:], 9], "weights": [1.0] * len(ids)})
            for chunks, ids in zip(self.chunks, self.ids, strict=True)
        ]


def log_probs_over_http(client: Client, base: str, rows: Rows) -> list[Sequence[Any]]:
    """Return the log-probs before and after a step."""
    model = client.model(base, seed=11)
    first = client.result(model.backward(rows.datums(), forward_only=True))
    client.result(model.backward(rows.datums()))
    client.result(model.step(learning_rate=RATE))
    last = client.result(model.backward(rows.datums(), forward_only=True))
    return [outputs(body)[0] for body in (first, last)]


def log_probs_in_process(config: Any, rows: Rows) -> list[Sequence[Any]]:
    """Return the same log-probs by calls of the actor's verbs."""
    results = []
    lm_rows = [
        LMRow(np.array([*ids, 9]), np.ones(len(ids) + 1, bool), refs)
        for ids, refs in zip(rows.ids, rows.refs, strict=True)
    ]
    batch = lm_batch(lm_rows, ["a", "b", "c"], 0)
    responses: Any = batch.column("responses")
    batch.set_columns({"weights": responses.with_values(torch.ones(len(responses.values)))})
    with reproducible_arithmetic(), WorkerGroups(config) as groups:
        actor = groups["actor"]
        actor.init_model(0)
        actor.add_state("mine", 4, 11)
        actor.use_state("mine")
        for _ in range(2):
            results.append(
                [row.tolist() for row in actor.forward(batch).column("log_probs").rows()]
            )
            actor.forward_backward(batch, "cross_entropy")
            settings = OptimStepSettings(
                lr=RATE, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0, grad_clip=float("inf")
            )
            actor.optim_step(settings)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("qwen2_vl", tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def rows(folder: Path) -> Rows:
    return Rows(folder)


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(config_of(folder, tmp_path_factory.mktemp("saved"), *WIDTHS)) as (_, running):
        yield running


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url) as opened:
        yield opened
        opened.post(f"sessions/{opened.session}/finish")


def of_transformers(folder: Path, rows: Rows) -> list[torch.Tensor]:
    from transformers import AutoModelForImageTextToText

    module = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    results = []
    for ids, refs in zip(rows.ids, rows.refs, strict=True):
        row = torch.tensor([ids])
        inputs = rows.reader.inputs(refs) if refs else {}
        types = (row == rows.reader.token_id).int()
        with torch.no_grad():
            logits = module(input_ids=row, mm_token_type_ids=types, **inputs).logits[0]
        targets = torch.tensor([*ids[1:], 9])
        results.append(logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])
    return results


def test_training_has_the_numbers_of_transformers_and_the_bits_of_the_verbs(
    client: Client, folder: Path, rows: Rows, tmp_path: Path
) -> None:
    first, last = log_probs_over_http(client, str(folder), rows)
    for ours, theirs in zip(first, of_transformers(folder, rows), strict=True):
        torch.testing.assert_close(torch.tensor(ours), theirs, atol=1e-5, rtol=1e-5)
    assert log_probs_in_process(config_of(folder, tmp_path, *WIDTHS), rows) == [first, last]
    assert first != last


def test_samples_after_images_have_the_log_probs_of_a_forward_pass(
    client: Client, folder: Path, rows: Rows
) -> None:
    model = client.model(str(folder), seed=3)
    client.result(model.backward(rows.datums()))
    client.result(model.step(learning_rate=RATE))
    sampler = model.sampler(1)
    promises = []
    for number, chunks in enumerate(rows.chunks):
        sent = [
            {"type": "image", **part, "data": b64encode(part["data"]).decode()}
            if isinstance(part, dict)
            else {"type": "encoded_text", "tokens": part}
            for part in chunks
        ]
        settings = {"max_tokens": 6, "seed": number, "stop": []}
        fields: dict[str, Any] = {"prompt": {"chunks": sent}, "sampling_params": settings}
        promises.append(
            client.sample(sampler, number, [], num_samples=2, prompt_logprobs=True, **fields)
        )
    for chunks, ids, promise in zip(rows.chunks, rows.ids, promises, strict=True):
        body = client.result(promise)
        for tokens, log_probs, _ in sequences(body):
            inputs = {"target_tokens": [*ids[1:], *tokens]}
            datum = (*chunks, tokens[:-1]), inputs
            (row,), _ = outputs(client.result(model.backward([datum], forward_only=True)))
            assert row[-len(tokens) :] == pytest.approx(log_probs, abs=1e-5)
            assert prompt_log_probs(body)[1:] == pytest.approx(row[: len(ids) - 1], abs=1e-5)


def test_bad_images_are_rejected_in_words(client: Client, folder: Path, rows: Rows) -> None:
    model = client.model(str(folder))
    count = len(rows.reader.ids_of(rows.refs[0][0]))
    token = rows.reader.token_id
    bad = {
        "chunk 1 is an image of the format 'webp', not png or jpeg": ([5], image(0, "webp")),
        "chunk 0: an image in the row is not a readable image": (image(0) | {"data": b"no"}, [5]),
        f"40 x 70 pixels as {count} tokens, but expected_tokens=3": (
            image(0, expected_tokens=3),
            [5],
        ),
        f"its text has the token {token}, which stands for an image": ([token], image(0)),
    }
    for words, chunks in bad.items():
        inputs = {"target_tokens": [5] * (count + 1)}
        promise = model.backward([(chunks, inputs)], forward_only=True)
        with pytest.raises(FailedError, match=f"user: datum 0: .*{words}"):
            client.result(promise)
    sent = {"type": "image", "data": b64encode(image(0)["data"]).decode(), "format": "gif"}
    with pytest.raises(FailedError, match="the prompt: chunk 0 is an image of the format 'gif'"):
        client.sample(client.sampler(base_model=str(folder)), 1, [], prompt={"chunks": [sent]})


def test_a_text_model_rejects_images_in_words(tiny_dir: Path, tmp_path: Path) -> None:
    with (
        served(config_of(tiny_dir / "model", tmp_path)) as (queue, address),
        Client(address) as text,
    ):
        model = text.model(queue.base_model)
        promise = model.backward([((image(0), [5]), {"target_tokens": [5, 6]})])
        with pytest.raises(FailedError, match="user: datum 0: chunk 0: the model .* does not read"):
            text.result(promise)


class TestSDK:
    pytestmark = needs_sdk

    def test_the_sdk_sends_images(self, url: str, folder: Path, rows: Rows, tmp_path: Path) -> None:
        picture(*SIZES[0]).save(tmp_path / "0.png")
        before, after = rows.chunks[0][0], rows.chunks[0][2]
        count = len(rows.reader.ids_of(image_ref(tmp_path / "0.png")))
        arguments = [f"{tmp_path}/0.png", f"{count}", f"{before}", f"{after}"]
        printed = run_sdk("tests/trainer/serve/sdk_images.py", url, str(folder), *arguments)
        assert "trained and sampled" in printed
