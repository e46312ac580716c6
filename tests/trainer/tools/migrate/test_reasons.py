"""Keys and commands in the messages of `migrate` exist."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import pytest

from trainer.cli.main import COMMANDS
from trainer.config.keys import named_keys
from trainer.ppo.config import PPOConfig
from trainer.ppo.verl_keys import tables
from trainer.tools.migrate.systems import RECIPES
from trainer.tools.migrate.translation import read_table

OF_SECTIONS = ("openrlhf_rows", "trl", "coati", "verl_sft")
NOT_KEYS = re.compile(r"FILE\.py|MODULE\.NAME|docs/\S+|config\.json|verl_like\.rules")
NAMED = re.compile(r"([A-Za-z_][\w.]*)=|\b(\w+(?:\.\w+)+)\b")
KEYS_OF_NO_SCHEMA = ("placement", "role_mapping.reward_model")
"""A preset, and a key that contains the name of a role."""


@cache
def known() -> frozenset[str]:
    """All keys of all recipes."""
    for recipe in RECIPES.values():
        recipe.load_registries()
    return frozenset(name for recipe in RECIPES.values() for name in named_keys(recipe.schema))


def reasons() -> Iterator[str]:
    """Return the tables' texts for flags and keys that have no counterpart."""
    for system in ("openrlhf", *OF_SECTIONS):
        tree = read_table(system)
        for rows in tree.values() if system in OF_SECTIONS else [tree]:
            yield from (
                str(row[kind])
                for row in rows.values()
                if isinstance(row, Mapping)
                for kind in ("absent", "rejected", "otherwise")
                if kind in row
            )
    yield from (str(row["else"]) for row in tables().changes_nothing_at.values())
    yield from tables().not_here.values()


def keys_in(reason: str) -> list[str]:
    return [name or dotted for name, dotted in NAMED.findall(NOT_KEYS.sub("", reason))]


def is_key(name: str) -> bool:
    return name in KEYS_OF_NO_SCHEMA or any(
        f".{name.removesuffix('.vllm')}." in f".{key}." for key in known()
    )


def test_the_keys_and_commands_of_reasons_exist() -> None:
    texts = set(reasons())
    assert [name for text in texts for name in keys_in(text) if not is_key(name)] == []
    commands = {word for text in texts for word in re.findall(r"verl-like (\S+?)\b", text)}
    assert commands - {"reward", *COMMANDS} == set()


@pytest.mark.parametrize("section", ["changes_nothing", "changes_nothing_at", "not_here"])
def test_the_table_of_verl_s_other_keys_has_none_of_ours(section: str) -> None:
    ours = set(named_keys(PPOConfig))
    patterns: Mapping[str, Any] = getattr(tables(), section)
    named = {pattern: [key for key in ours if fnmatchcase(key, pattern)] for pattern in patterns}
    assert {pattern: keys for pattern, keys in named.items() if keys} == {}
