"""A server in this process for all tests of a file, and a session with a model of rank 4."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.serve.clients import Client, Model, config_of, served
from trainer.serve.work_queue import WorkQueue


@pytest.fixture(scope="module")
def server(
    tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[WorkQueue, str]]:
    config = config_of(tiny_dir / "model", tmp_path_factory.mktemp("saved"))
    with served(config) as running:
        yield running


@pytest.fixture
def client(server: tuple[WorkQueue, str]) -> Iterator[Client]:
    with Client(server[1]) as opened:
        yield opened
        opened.post(f"sessions/{opened.session}/finish")


@pytest.fixture
def model(client: Client, server: tuple[WorkQueue, str]) -> Model:
    return client.model(server[0].base_model)
