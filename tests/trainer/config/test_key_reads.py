"""Every key of the configuration is read by code other than the checks."""

from __future__ import annotations

import re

import pytest

from tests.import_graph import PACKAGES, sources
from trainer.async_training.recipe import ASYNC
from trainer.config.keys import leaf_keys
from trainer.config.schema import Recipe
from trainer.ppo.recipe import PPO
from trainer.preference.recipe import DPO
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.sft.recipe import SFT
from trainer.tools.evaluation.recipe import EVAL

NO_READERS = ("checks.py", "config_errors.py", "unused_keys.py")
READ_NAME = re.compile(r"\.(\w+)\b(?!\s*(?:=[^=]|: ))|[\"'](\w+)[\"']")
"""An attribute that is not assigned, or a name in quotes."""


@pytest.fixture(scope="module")
def names_read() -> set[str]:
    """Return every name that some source may read from a section."""
    paths = [path for package in PACKAGES for path in sources(package)]
    texts = [path.read_text(encoding="utf-8") for path in paths if path.name not in NO_READERS]
    return {name for text in texts for pair in READ_NAME.findall(text) for name in pair if name}


@pytest.mark.parametrize(
    "recipe", [PPO, ASYNC, SFT, REWARD_MODEL, DPO, EVAL], ids=lambda each: each.name
)
def test_every_key_is_read_somewhere(recipe: Recipe[object], names_read: set[str]) -> None:
    unread = []
    for key in leaf_keys(recipe.schema):
        name = key.name.rpartition(".")[2]
        if name not in names_read:
            unread.append(key.name)
    assert unread == []
