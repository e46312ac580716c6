"""A run that begins with fewer generators than it may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import overrides
from trainer import load_config
from trainer.async_training.config import AsyncConfig
from trainer.async_training.recipe import ASYNC
from trainer.groups.nodes import plan_on
from verl_like.errors import ConfigError, InsufficientResourcesError
from verl_like.placement.pools import NodeSpec

RESTART = "async_training.on_generator_failure=restart"


def config_of(tiny: Path, folder: Path, *more: str) -> AsyncConfig:
    settings = ("trainer.backend=ray", "async_training.generators=3", *more)
    return load_config(overrides(tiny, folder, *settings), ASYNC)


def test_generators_without_room_are_left_out_down_to_the_minimum(
    tiny_dir: Path, tmp_path: Path
) -> None:
    config = config_of(tiny_dir, tmp_path, "async_training.min_generators=2", RESTART)
    nodes = [NodeSpec(f"{number}", 1, 1.0, key=f"{number}") for number in range(4)]
    assert len(plan_on(config, nodes).pools) == 4
    assert list(plan_on(config, nodes[:3]).pools) == [
        *("trainer_pool", "generator_0_pool", "generator_1_pool")
    ]
    with pytest.raises(InsufficientResourcesError, match="generator_1_pool"):
        plan_on(config, nodes[:2])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["async_training.min_generators=4", RESTART], "needs 4 or more generators"),
        (
            ["async_training.min_generators=1", RESTART, "async_training.trainers=2"],
            "list every pair in async_training.sample_routes",
        ),
        (["async_training.min_generators=1"], "on_generator_failure=fail ends the run"),
    ],
)
def test_settings_without_a_way_for_samples_are_rejected(
    tiny_dir: Path, tmp_path: Path, settings: list[str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        config_of(tiny_dir, tmp_path, *settings)
