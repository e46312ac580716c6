"""The KV cache's size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.samples import started, tiny_config
from verl_like.errors import RolloutError
from workers.roles.rollout import RolloutWorker


def test_a_cache_too_small_for_its_least_rows_says_how_much_it_needs(tiny_dir: Path) -> None:
    config = tiny_config(tiny_dir)
    config.actor_rollout_ref.rollout.kv_cache_gb = 1e-6
    with pytest.raises(
        RolloutError,
        match=r"kv_cache_gb=1e-06 is too small.*takes .* GiB.*kv_cache_gb to .* or more",
    ):
        started(RolloutWorker, config)
    config.actor_rollout_ref.rollout.kv_cache_gb = 3e-4
    assert 4 <= started(RolloutWorker, config).engine.max_active < 20
