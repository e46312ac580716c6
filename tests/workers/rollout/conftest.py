"""Every rollout engine on one tiny model: `hf` the oracle, `native`, and `vllm`.

vLLM has an environment of its own, tests/run_vllm.sh.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.workers.rollout_engines import load, make_engine, make_model
from workers.rollout.base import RolloutEngine

ENGINES = ["hf", "native", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contract")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return make_model(folder)


@pytest.fixture(scope="module", params=ENGINES)
def kept_engine(request: pytest.FixtureRequest, model: Any, folder: Path) -> RolloutEngine:
    return make_engine(request.param, model, folder)


@pytest.fixture
def engine(kept_engine: RolloutEngine, model: Any) -> RolloutEngine:
    load(kept_engine, model, 3)
    return kept_engine
