"""Every stage that a recipe times in a step is one that its trainer names, so reports show it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainer.loop import Trainer
from trainer.ppo.stages import PPOTrainer
from trainer.preference.step import PreferenceTrainer
from trainer.reward_model.step import RewardModelTrainer
from trainer.sft.step import SFTTrainer
from trainer.tools.evaluation.step import Evaluation

TRAINER = Path(__file__).resolve().parents[2] / "trainer"
BEFORE_STEPS = {"reference"}
RECIPES = [PPOTrainer, SFTTrainer, RewardModelTrainer, PreferenceTrainer, Evaluation]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_declares_every_stage_that_it_times(recipe: type[Trainer]) -> None:
    timed: set[str] = set()
    for cls in recipe.__mro__:
        path = TRAINER.parent / (cls.__module__.replace(".", "/") + ".py")
        if cls is Trainer or not path.is_file():
            continue
        timed |= set(
            re.findall(r'self\.(?:clock|stage)\("(\w+)"', path.read_text(encoding="utf-8"))
        )
    assert timed - BEFORE_STEPS == set(recipe.stages)
