"""Every key of the configuration is read by some source beside the checks."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

import pytest

from tests.import_graph import PACKAGES, parsed, sources
from tests.trainer.config.key_reads import keys_that_nothing_reads
from trainer.ppo.config import PPOConfig
from trainer.reward_model.recipe import RewardModelRunConfig

CHECKS = ("checks.py", "unused_keys.py")


@dataclass
class Section:
    size: int = 1
    seed: int = 0


@dataclass
class Root:
    first: Section = field(default_factory=Section)
    second: Section = field(default_factory=Section)
    other: int = 0


READS_ALL = """
def use(config: Root):
    config.other, config.second
    section = config.first
    return section.size + section.seed
"""


@pytest.mark.parametrize("schema", [PPOConfig, RewardModelRunConfig])
def test_every_key_is_read_somewhere(schema: type) -> None:
    paths = [path for package in PACKAGES for path in sources(package)]
    modules = [parsed(path) for path in paths if path.name not in CHECKS]
    assert keys_that_nothing_reads(schema, modules) == []


def unread(*texts: str) -> list[str]:
    """The keys of `Root` that none of these modules reads."""
    return keys_that_nothing_reads(Root, [ast.parse(text) for text in texts])


def test_a_field_is_read_through_a_name_that_holds_its_section() -> None:
    assert unread(READS_ALL) == []


def test_a_key_is_not_read_where_another_thing_has_an_attribute_of_its_name() -> None:
    source = READS_ALL.replace("section.seed", "torch.seed() + self.seed + known['seed']")
    assert unread(source) == ["first.seed", "second.seed"]


def test_a_section_that_nothing_reaches_is_not_read() -> None:
    source = READS_ALL.replace(", config.second", "")
    assert unread(source) == ["second"]


def test_a_key_that_is_only_written_is_not_read() -> None:
    source = READS_ALL.replace("config.other,", "config.other = 1;")
    assert unread(source) == ["other"]


@pytest.mark.parametrize(
    "read",
    [
        "vars(config.first)",
        "getattr(config.first, 'size') + any_function(config.first, 'seed')",
        "[getattr(config.first, name) for name in ('size', 'seed')]",
        "any_thing.first.size + any_thing.first.seed",
    ],
)
def test_a_field_is_read_by_other_means(read: str) -> None:
    source = READS_ALL.replace("section.size + section.seed", read)
    assert unread(source) == []


def test_a_field_is_read_through_a_protocol_that_its_section_has() -> None:
    source = """
class Sized(Protocol):
    size: int

def measure(one: Sized):
    return one.size
"""
    reads_the_seed_alone = READS_ALL.replace("section.size + ", "")
    assert unread(reads_the_seed_alone, source) == []
    strange = source.replace("    size: int", "    size: int\n    weight: int")
    expected = ["first.size", "second.size"]
    assert unread(reads_the_seed_alone, strange) == expected
