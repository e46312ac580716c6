"""The tables of flags: unique names, consistent rows, and keys that exist."""

from __future__ import annotations

from collections import Counter

import pytest

from trainer.config.keys import known_arguments, named_keys
from trainer.tools.migrate.openrlhf import ON_ROWS
from trainer.tools.migrate.systems import RECIPES
from trainer.tools.migrate.translation import KINDS, Table, Translation, read_table
from trainer.tools.migrate.trl import PLACES, PROGRAMS

TRL = [
    ("trl", ("all", "samples" if ours == "ppo" else "rows", theirs), ours)
    for theirs, ours in PROGRAMS.items()
]
ROWS = [("openrlhf_rows", ("all", theirs), ours) for theirs, ours in ON_ROWS.items()]
SFT = [("verl_sft", ("all", theirs), "sft") for theirs in ("fsdp_sft_trainer", "sft_trainer")]
TABLES = [("openrlhf", (), "ppo"), ("coati", ("all", "async"), "async"), *TRL, *ROWS, *SFT]


@pytest.mark.parametrize(("system", "sections", "program"), TABLES)
def test_every_key_of_a_table_exists(system: str, sections: tuple[str, ...], program: str) -> None:
    schema = RECIPES[program].schema
    RECIPES[program].load_registries()
    arguments = {key.name for key in known_arguments(schema)}
    # the critic has the keys of the actor's section
    of_critic = {name.replace("actor_rollout_ref.actor", "critic") for name in arguments}
    known = {*named_keys(schema), "reward.overlong_penalty.len", *arguments, *of_critic}
    for name, row in Table(system, *sections).rows.items():
        done = Translation(program, places=PLACES if program == "ppo" and system == "trl" else {})
        done.rename(name, row.settings)
        keys = {key for key in done.settings if "engine_kwargs" not in key}
        keys |= {key for each in row.values.values() if isinstance(each, dict) for key in each}
        assert keys <= known, name


@pytest.mark.parametrize(("system", "sections"), [table[:2] for table in TABLES])
def test_every_flag_has_one_row_with_one_outcome(system: str, sections: tuple[str, ...]) -> None:
    tree = read_table(system)
    parts = [tree[name] for name in sections] if sections else [tree]
    names = Counter(name for part in parts for names in part for name in names.split())
    del names["rules"]
    assert [name for name, times in names.items() if times > 1] == []
    for name, row in Table(system, *sections).rows.items():
        outcomes = [getattr(row, kind) for kind in KINDS]
        assert sum(map(bool, [*outcomes, row.taken_with, row.settings])) == 1, name
