"""The flags of a system, as data: `openrlhf.yaml`, `trl.yaml`, `coati.yaml` beside this file.

    name other_name: {always: "what is the case here, whatever the value"}
    name: some.key                                  # the key of ours that means the same
    name: {key: some.key, values: {theirs: ours}}   # an item of `values` may be several settings
    name: {set: {some.key: "{}", other.key: "{1}", third.key: "{other_name}"}}

`{}` stands for the flag's value, `{1}` for the second one of several, `{other_name}` for that of
another flag. A row may have more:

    new         a later spelling
    default     what holds there without the flag: it is set here, too
    needs       the flag is read with that one alone: `flag`, `not flag`, `flag=value`
    at          values at which the flag changes nothing
    only        other values than those of `values` are refused, with this
    otherwise   other values have no counterpart and are refused, with this
    absent      the flag has no counterpart, with the way out; the experiment is the same without it
    refused     the flag has no counterpart, and without it the experiment would be another one
    with        a rule in code takes the flag with others, and sets these keys

A name may hold `*`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Row:
    """What becomes of one flag."""

    settings: Mapping[str, str] = field(default_factory=dict)
    """Key -> the value, or a template of it."""
    values: Mapping[str, str | Mapping[str, str]] = field(default_factory=dict)
    new: str = ""
    default: str = ""
    needs: str = ""
    at: tuple[str, ...] = ()
    only: str = ""
    otherwise: str = ""
    always: str = ""
    absent: str = ""
    refused: str = ""
    taken_with: str = ""

    def here(self) -> str:
        """What the docs say about it."""
        keys = ", ".join(f"`{key.removeprefix('+')}`" for key in self.settings)
        if self.always:
            return f"always: {self.always}"
        if absent := self.absent or self.refused:
            what = f"{'dropped' if self.absent else 'not here'}: {absent}"
            values = ", ".join(f"`{value}`" for value in self.at)
            return f"changes nothing at {values}; else {what}" if values else what
        return self.taken_with or keys


class Table:
    """The rows of a system, or of one of its commands."""

    def __init__(self, system: str, *sections: str) -> None:
        tree = _read(system)
        self.rows: dict[str, Row] = {}
        for part in [tree[name] for name in sections] if sections else [tree]:
            for names, facts in part.items():
                self.rows |= dict.fromkeys(names.split(), _row(facts))
        self.older = {row.new: name for name, row in self.rows.items() if row.new}
        """Later spelling -> name."""

    def find(self, name: str) -> Row | None:
        """The row of that name, or of a pattern that it fits."""
        if name in self.rows:
            return self.rows[name]
        return next((row for each, row in self.rows.items() if fnmatchcase(name, each)), None)

    def known(self) -> list[str]:
        """All names, in every spelling."""
        return [*self.rows, *self.older]


def doc_rows(system: str, dashes: str = "") -> list[list[str]]:
    """(there, here) of every flag, for the system's page in the docs."""
    tree = _read(system)
    sections = list(tree) if "all" in tree else [""]
    rows = []
    for section in sections:
        of_command = f" ({section})" if section not in ("", "all") else ""
        for name, row in Table(system, *filter(None, [section])).rows.items():
            spelled = [f"`{dashes}{each}`" for each in (name, row.new) if each]
            rows.append([" ".join(spelled) + of_command, row.here()])
    return sorted(rows)


@cache
def _read(system: str) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load((FOLDER / f"{system}.yaml").read_text(encoding="utf-8"))
    return tree


def _row(facts: str | dict[str, Any]) -> Row:
    facts = {"key": facts} if isinstance(facts, str) else dict(facts)
    settings = facts.pop("set", {})
    if "key" in facts:
        settings = {facts.pop("key"): "{}"}
    values = {str(theirs).lower(): ours for theirs, ours in facts.pop("values", {}).items()}
    at = tuple(str(value) for value in facts.pop("at", ()))
    taken_with = facts.pop("with", "")
    rest = {name: str(value) for name, value in facts.items()}
    return Row(settings, values, at=at, taken_with=taken_with, **rest)
