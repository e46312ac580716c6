"""The rollout without an actor has the weights of its folder, in the engine's dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.samples import started, tiny_config
from workers.roles.rollout import SamplerWorker


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_gets_the_weights_of_the_folder(tiny_dir: Path, dtype: str) -> None:
    config = tiny_config(tiny_dir)
    config.actor_rollout_ref.rollout.dtype = dtype
    worker = started(SamplerWorker, config)
    assert worker.engine.version == 0
    weights, read = dict(worker.engine.named_weights()), dict(worker.folder_weights())
    assert weights.keys() == read.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in read.items())
    assert next(iter(read.values())).dtype == getattr(torch, dtype)
