"""`syncs.jsonl` has a line for every delivery of weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.runs import lines
from trainer.async_training.activity import Activity
from trainer.async_training.recipe import ASYNC
from trainer.async_training.weights import WeightFeed
from trainer.ppo.recipe import load_config


def figures(version: int) -> dict[str, float]:
    """Return the report of a delivery of 5 MiB."""
    return {
        "timing_s/weight_sync": 0.25,
        "perf/weight_sync_hash_s": 0.125,
        "perf/weight_sync_mb": 5.0,
        "training/weight_version": float(version),
    }


def test_a_generators_copy_of_the_critic_has_lines_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [
        "data.train_files=x",
        "actor_rollout_ref.model.path=y",
        "async_training.log_syncs=true",
    ]
    settings += ["async_training.generators=2", "async_training.score_on=generator"]
    config = load_config([*settings, f"trainer.default_local_dir={tmp_path}"], ASYNC)
    monkeypatch.setattr(
        "trainer.async_training.weights.deliver_weights", lambda *_, **__: figures(3)
    )
    groups: Any = dict.fromkeys([*config.role_mapping], None)
    run: Any = SimpleNamespace(config=config, groups=groups)
    unused: Any = None
    feed = WeightFeed(run, unused, unused, Activity())
    assert feed.deliver(1) == 3
    roles = [line["role"] for line in lines(tmp_path, "syncs.jsonl")]
    assert roles == ["rollout_1", "critic_copy_1"]
