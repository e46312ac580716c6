"""Write what the docs say about keys and columns from the code: `python docs/make_tables.py`.

The tables stand between `<!-- begin … -->` and `<!-- end … -->` in `configuration.md` and
`dataflow.md`; a test checks that they are current.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.cli.explain import field_docs
from trainer.config.keys import Key, config_keys, read
from trainer.ppo.config import PPOConfig
from workers.columns import COLUMNS

DOCS = Path(__file__).resolve().parent


def key_table() -> str:
    """A table for every section: key, default, values, when it is read, resume, meaning."""
    docs, default = field_docs(), PPOConfig()
    keys = {key.name: key for key in config_keys(PPOConfig)}
    rows: dict[str, list[str]] = {}
    for key in keys.values():
        if not key.is_section:
            section, _, leaf = key.name.rpartition(".")
            cells = [f"`{leaf}`", _show(read(default, key.name)), *_rule_cells(key)]
            meaning = _cell(docs[key.name]) + _name_in_verl(key)
            rows.setdefault(section, []).append(f"| {' | '.join([*cells, meaning])} |")

    parts = []
    for section, lines in rows.items():
        intro = _section_intro(keys[section], docs[section]) if section else "## Top level\n"
        parts.append("\n".join([intro, *HEAD_OF_KEYS, *lines]))
    return "\n\n".join(parts)


HEAD_OF_KEYS = (
    "| key | default | values | read when | resume | meaning |",
    "|---|---|---|---|---|---|",
)


def _section_intro(section: Key, doc: str) -> str:
    """Heading, docstring, and the rules that hold for all of its keys."""
    values, read_when, resume = _rule_cells(section)
    rules = f" Read when {read_when}." if read_when else ""
    rules += " A resumed run may change all of it." if resume else ""
    return f"## `{section.name}`\n\n{doc}{rules}\n"


def _rule_cells(key: Key) -> tuple[str, str, str]:
    """Values, when it is read, and whether a resumed run may change it."""
    read_when = " and ".join(condition.says for condition in key.rules.read_when)
    resume = "may change" if key.rules.may_change_on_resume else ""
    return _cell(key.allowed), _cell(read_when), resume


def _name_in_verl(key: Key) -> str:
    return f" In verl: `{key.rules.verl}`." if key.rules.verl else ""


def column_table() -> str:
    """The batch's columns."""
    rows = [
        f"| `{c.name}` | `{c.shape}` | {c.dtype} | {_cell(c.written_by)} |"
        for c in COLUMNS.values()
    ]
    return "\n".join(["| column | shape | type | written by |", "|---|---|---|---|", *rows])


def _show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "`null`" if value is None else f"`{str(value).lower()}`"
    value = list(value) if isinstance(value, tuple) else value
    return f"`{value}`" if value != "" else ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "keys": ("configuration.md", key_table),
    "columns": ("dataflow.md", column_table),
}


def filled(name: str) -> tuple[Path, str]:
    """The page that holds the table `name`, with the table as it should be."""
    page, make = TABLES[name]
    path = DOCS / page
    block = f"<!-- begin {name} -->\n\n{make()}\n\n<!-- end {name} -->"
    text = re.sub(
        rf"<!-- begin {name} -->.*<!-- end {name} -->",
        lambda _: block,
        path.read_text("utf-8"),
        flags=re.S,
    )
    return path, text


def main() -> None:
    """Write every table."""
    for name in TABLES:
        path, text = filled(name)
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
