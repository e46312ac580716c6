"""The plan that a run prints before it starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import overrides
from trainer import load_config
from trainer.async_training.recipe import ASYNC
from trainer.config.schema import Recipe
from trainer.launch import describe_plan, nominal_placement, trainer_class
from trainer.ppo.recipe import PPO
from trainer.sft.recipe import SFT

MAX_LINES = 12
SFT_RUN = ("data.train_files=t.jsonl", "model.path={tiny}/model", "trainer.backend=local")
TWO = ("trainer.n_gpus_per_node=2", "trainer.device=cpu")


def plan(config: Any, full: bool) -> list[str]:
    placement = nominal_placement(config)
    return describe_plan(placement, config, trainer_class(config), full).splitlines()


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        (PPO, ["placement=split", *TWO]),
        (PPO, ["placement=split", "trainer.backend=local", *TWO]),
        (ASYNC, ["async_training.topology=1m1t", "algorithm.use_kl_in_reward=false", *TWO]),
        (SFT, []),
    ],
)
def test_only_the_full_plan_is_long(
    recipe: Recipe,
    more: list[str],
    tiny_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if recipe is SFT:
        settings = [setting.format(tiny=tiny_dir) for setting in SFT_RUN]
    else:
        settings = overrides(tiny_dir, Path("run"), *more)
    brief = plan(load_config(settings, recipe), full=False)
    assert len(brief) <= MAX_LINES, "\n".join(brief)
    assert brief[-1] == "With --full, `verl-like check` prints the whole plan."
    full = plan(load_config(settings, recipe), full=True)
    assert len(full) > len(brief)
    assert any("Memory: Estimated MiB per device" in line for line in full)
