"""Many clients of one server: their memory, and batches that they share."""

from __future__ import annotations

import gc
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch.nn import Linear
from transformers import AutoModelForCausalLM

from tests.live_bytes import live_bytes
from tests.trainer.serve.clients import (
    TEXT,
    Client,
    Model,
    config_of,
    datum,
    sequences,
    served,
)
from trainer.serve import clients, pending, sampling
from trainer.serve.pending import PendingResult
from trainer.serve.work_queue import WorkQueue
from workers.rollout.client import RolloutClient, Submission

RANK, CLIENTS = 32, 6


def bytes_of_adapter(model: Path) -> int:
    """Return the bytes of float32 adapters of all linear layers but the head."""
    layers = AutoModelForCausalLM.from_pretrained(model).named_modules()
    linear = [layer for name, layer in layers if isinstance(layer, Linear) and name != "lm_head"]
    return sum(4 * RANK * (layer.in_features + layer.out_features) for layer in linear)


def settled_bytes() -> int:
    """Return the bytes of tensors after threads have let go of the last request's."""
    last = -1
    while (size := live_bytes()) != last:
        last = size
        time.sleep(0.2)
    return size


@pytest.mark.long
def test_idle_clients_cost_only_their_adapters(tiny_dir: Path, tmp_path: Path) -> None:
    adapter = bytes_of_adapter(tiny_dir / "model")
    config = config_of(tiny_dir / "model", tmp_path, rank=RANK)
    with served(config) as (work_queue, url), Client(url) as first, ExitStack() as open_clients:
        first.model(work_queue.base_model, rank=RANK).train()
        before = settled_bytes()
        clients = [open_clients.enter_context(Client(url)) for _ in range(CLIENTS)]
        for client in clients:
            client.model(work_queue.base_model, rank=RANK)
        assert settled_bytes() - before == CLIENTS * adapter
        for client in clients:
            client.post(f"sessions/{client.session}/finish")
        # runs after the states of the other clients are deleted
        first.model(work_queue.base_model, 1, rank=RANK).train()
        trained = settled_bytes() - before
        # weights, two moments, and a count of steps per tensor
        assert 3 * adapter <= trained < 3.01 * adapter


@pytest.mark.long
def test_memory_does_not_grow_with_the_number_of_requests(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "MAX_READ", 4)
    monkeypatch.setattr(clients, "MAX_SEEN", 4)

    def forward(count: int) -> tuple[int, int]:
        for _ in range(count):
            model.client.result(model.backward([datum()], forward_only=True))
        tensors = settled_bytes()
        return tensors, sum(isinstance(value, PendingResult) for value in gc.get_objects())

    assert forward(8) == forward(16)


def test_requests_of_several_clients_share_a_batch(
    client: Client, server: tuple[WorkQueue, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    work_queue, url = server
    batches: list[int] = []

    class Spy(RolloutClient):
        def submit(self, *submissions: Submission) -> None:
            batches.extend(len(s.rows) for s in submissions)
            super().submit(*submissions)

    def draw(session: Client) -> list[Any]:
        sampler = session.sampler(base_model=work_queue.base_model)
        return [session.sample(sampler, number, TEXT, num_samples=2) for number in (1, 2)]

    def results(session: Client, answers: list[Any]) -> list[Any]:
        return [sequences(session.result(answer)) for answer in answers]

    alone = results(client, draw(client))
    monkeypatch.setattr(sampling, "RolloutClient", Spy)
    monkeypatch.setattr(work_queue.sampling, "_client", Spy(work_queue.ops.rollout))
    with Client(url) as second, Client(url) as third:
        release = threading.Event()
        work_queue.work(Mock(), lambda: {"released": release.wait()})
        sent = [(session, draw(session)) for session in (second, third)]
        release.set()
        for session, of_session in sent:
            assert results(session, of_session) == alone
    assert batches == [8]
