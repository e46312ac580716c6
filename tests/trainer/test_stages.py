"""A recipe names the stages that its steps time, and PPO's step is on the first screen."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from trainer.loop import Trainer
from trainer.ppo import stages
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
    assert timed - BEFORE_STEPS == set(recipe.recipe.stages)


def test_the_first_screen_of_ppo_ends_with_its_step() -> None:
    """The docstring, at most 15 imports, the class and `step` come first."""
    module = ast.parse(inspect.getsource(stages))
    _, *statements = module.body
    trainer = next(node for node in statements if isinstance(node, ast.ClassDef))
    imports = statements[: statements.index(trainer)]
    assert all(isinstance(node, ast.Import | ast.ImportFrom) for node in imports)
    assert len(imports) <= 15
    step = next(node for node in trainer.body if isinstance(node, ast.FunctionDef))
    assert step.name == "step"
    assert (step.end_lineno or 0) <= 60
