"""Every rollout engine on one tiny model: `hf`, `native`, and `vllm` here and as a server.

vLLM has a separate environment, which tests/run_vllm.sh creates.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers.rollout_engines import LIMITS, load, make_engine, make_model
from tests.workers.vllm_servers import vllm_server
from workers.rollout.base import RolloutEngine

ENGINES = [
    *("hf", "native"),
    *(pytest.param(name, marks=pytest.mark.vllm) for name in ("vllm", "vllm server")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contract")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return make_model(folder)


@pytest.fixture(scope="session")
def server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server for all modules, without weights, for every engine's model."""
    folder = tmp_path_factory.mktemp("served")
    make_model(folder)
    with vllm_server(folder, LIMITS) as url:
        yield url


@pytest.fixture(scope="module", params=ENGINES)
def kept_engine(request: pytest.FixtureRequest, model: Any, folder: Path) -> RolloutEngine:
    name, *server = request.param.split()
    url = request.getfixturevalue("server_url") if server else ""
    return make_engine(name, model, folder, url)


@pytest.fixture
def engine(kept_engine: RolloutEngine, model: Any) -> RolloutEngine:
    load(kept_engine, model, 3)
    return kept_engine
