"""One flipped bit, in the first or last byte of any tensor, is found, and the tensor is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.workers.rollout_engines import load, make_engine, make_model
from tests.workers.stand_ins import TiedModel
from verl_like.process.store import SignedStore
from workers.rollout.module_engine import ModuleEngine
from workers.weights.channel import Channel, pack
from workers.weights.checksum import CHUNK, Stopwatch
from workers.weights.connection import Connection

PLACES = [(0, 1), (0, 128), (-1, 1), (-1, 128)]
"""(byte, bit) of those that are flipped."""
UNSIGNED = SignedStore(cast(Any, None), "", "")


@pytest.mark.parametrize("limit", [20, 10**6])
def test_of_a_bucket(limit: int) -> None:
    weights = dict(TiedModel(0).named_parameters())
    weights["large"] = torch.randn(CHUNK // 4 + 3)
    flipped = []
    rooms = [torch.empty(limit, dtype=torch.uint8) for _ in range(2)]
    buckets = pack(weights.items(), limit, lambda n, size: rooms[n % 2][:size], Stopwatch())
    for number, bucket in enumerate(buckets):
        for (name, *_), chunk in zip(bucket.entries, bucket.contents(), strict=True):
            for byte, bit in PLACES:
                chunk[byte] ^= bit
                arriving = Channel(Connection("", 0, 2, None), UNSIGNED, 1, torch.device("cpu"))
                header = {"number": number, "tensors": bucket.entries}
                list(arriving._verified(number, bucket.payload, header))
                chunk[byte] ^= bit
                assert arriving.corrupt == [name]
            flipped.append(name)
    assert flipped == list(weights)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(model: Any) -> ModuleEngine:
    engine = make_engine("native", model, Path())
    assert isinstance(engine, ModuleEngine)
    return engine


def test_weights_of_an_engine_that_sleeps_take_no_memory(engine: ModuleEngine, model: Any) -> None:
    load(engine, model, 0)
    memory = [weight.untyped_storage()._weak_ref() for weight in engine.module.parameters()]
    is_free = torch.UntypedStorage._expired
    assert not any(map(is_free, memory))
    engine.sleep()
    assert all(map(is_free, memory))
