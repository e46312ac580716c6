"""Rules and rows of a table: expressions over flags, and the effects of rules."""

from __future__ import annotations

import pytest

from trainer.tools.migrate.translation import CommandFlags, FlagRow, Table, as_flags
from verl_like.errors import ConfigError


@pytest.fixture
def table() -> Table:
    table = Table("coati", "all")
    table.rows = {
        "rows": FlagRow.from_fields({"with": "x", "default": 8}),
        "kind": FlagRow.from_fields({"with": "x"}),
    }
    table.rows["twice"] = FlagRow.from_fields({"set": {"data.max_length": "{whole(twice / 2)}"}})
    table.rules = []
    return table


def flags(table: Table, *words: str) -> CommandFlags:
    return CommandFlags(table, as_flags(words), "no flag")


def test_rules_apply_in_order_where_they_hold(table: Table) -> None:
    flags_given = flags(table, "--rows", "4", "--kind", "a")
    keys = {"rows": "4", "kind": "a", "other.x": "1", "other.y": "2"}
    flags_given.apply(
        [
            {"let": {"all_rows": "rows * 10"}},
            {"when": "all_rows > 50", "error": "too many"},
            {"described": "{kind} of {all_rows}", "set": {"data.train_batch_size": "{all_rows}"}},
            {"described": "size", "theirs": "{rows}", "set": {"data.train_batch_size": "5"}},
            {"of": "kind", "theirs": "none", "set": {"data.prompt_key": "{kind}"}},
            {"drop": ["other.*"], "dropped": "there is no other"},
            {"when": "kind == 'a'", "always": "{kind} is so"},
        ],
        keys,
    )
    done = flags_given.done
    assert done.settings == {"data.train_batch_size": "40", "data.prompt_key": "a"}
    assert done.renamed == ["a of 40 -> data.train_batch_size=40", "--kind a -> data.prompt_key=a"]
    assert done.absent == ["other.x=1: there is no other", "other.y=2: there is no other"]
    assert (done.always, keys) == (["a is so"], {"rows": "4", "kind": "a"})
    with pytest.raises(ConfigError, match="^too many 3$"):
        flags_given.apply([{"error": "too many {1 + 2}"}])
