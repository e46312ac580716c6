"""`rollout.name` accepts a user's class by its dotted path."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest

from tests.integration.runs import POLICY_ALONE, overrides
from trainer import load_config, run
from verl_like.errors import ConfigError
from workers.config import ROLLOUT_ENGINES
from workers.rollout.base import SamplingParams
from workers.rollout.hf import HFRolloutEngine
from workers.rollout.sample import Sample


class CountingEngine(HFRolloutEngine):
    """Generates as `hf`, and counts."""

    num_responses: ClassVar[int] = 0

    def submit(self, samples: Sequence[Sample], sampling: SamplingParams) -> list[int]:
        CountingEngine.num_responses += len(samples)
        return super().submit(samples, sampling)


def make_step(tiny_dir: Path, folder: Path, name: str) -> None:
    settings = [
        f"actor_rollout_ref.rollout.name={name}",
        "trainer.backend=local",
        "data.max_response_length=2",
        "trainer.total_training_steps=1",
        *POLICY_ALONE,
    ]
    run(load_config(overrides(tiny_dir, folder, *settings)))


def test_a_run_samples_with_a_users_engine(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ROLLOUT_ENGINES, "_entries", dict(ROLLOUT_ENGINES))
    ROLLOUT_ENGINES.register("counting")(CountingEngine)
    for number, name in enumerate([f"{__name__}.CountingEngine", "counting"], start=1):
        make_step(tiny_dir, tmp_path / str(number), name)
        assert CountingEngine.num_responses == 16 * number


def test_an_object_that_is_no_engine_is_rejected(tiny_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Make it a subclass of verl_like.extend.RolloutEngine"):
        make_step(tiny_dir, tmp_path, f"{__name__}.make_step")
    with pytest.raises(ConfigError, match="unknown rollout engine 'natve'.*Did you mean 'native'"):
        make_step(tiny_dir, tmp_path, "natve")
    assert not list(tmp_path.glob("*.yaml"))  # before anything has started
