"""Write what the docs say about keys and columns from the code: `python docs/make_tables.py`.

The tables stand between `<!-- begin … -->` and `<!-- end … -->` in `configuration.md` and
`dataflow.md`; a test checks that they are current.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.cli.explain import field_docs
from trainer.config.checks import read
from trainer.config.compose import config_keys
from trainer.config.schema import PPOConfig
from workers.columns import COLUMNS

DOCS = Path(__file__).resolve().parent


def key_table() -> str:
    """A table for every section: key, default, meaning."""
    default, docs, kinds = PPOConfig(), field_docs(), dict(config_keys())
    sections: dict[str, list[str]] = {}
    for key, kind in kinds.items():
        if not dataclasses.is_dataclass(kind):
            section, _, leaf = key.rpartition(".")
            row = f"| `{leaf}` | {_show(read(default, key))} | {_cell(docs[key])} |"
            sections.setdefault(section, []).append(row)
    parts = []
    for section, rows in sections.items():
        intro = f"## `{section}`\n\n{docs[section]}\n" if section else "## Top level\n"
        parts.append("\n".join([intro, "| key | default | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


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
