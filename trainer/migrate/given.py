"""The flags that a foreign command gives, translated by the table and by rules in code.

    flags = GivenFlags(Table("openrlhf", "ppo"), as_flags(words), "... has no flag")
    flags.becomes("zero_stage", {"actor_rollout_ref.actor.strategy": "fsdp"})     # a rule
    done = flags.finish()                                                         # the table

A rule comes first; what it does not tell, the table does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from trainer.migrate.command import Flags
from trainer.migrate.table import Row, Table
from trainer.migrate.translation import Translation, as_text
from verl_like.errors import ConfigError, nearest

PLACEHOLDER = re.compile(r"\{(\w*)\}")


class GivenFlags:
    """The flags of one command by the names of the table, and their translation so far."""

    def __init__(
        self,
        table: Table,
        given: Flags,
        unknown: str,
        done: Translation | None = None,
        dashes: str = "--",
    ) -> None:
        self.done = done or Translation()
        self._dashes = dashes
        self._table, self._unknown = table, unknown
        self._spelled = {table.older.get(name, name): name for name in given}
        self._values = {table.older.get(name, name): values for name, values in given.items()}
        self._told: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the command has the flag."""
        return name in self._values

    def values(self, name: str) -> list[str]:
        """The flag's values, none where the command has no such flag."""
        return self._values.get(name, [])

    def value(self, name: str, default: str = "") -> str:
        """The flag's value, or its default: True of a flag alone, a list of several values."""
        if name not in self._values:
            row = self._table.find(name)
            return default or (row.default if row else "")
        values = self._values[name] or ["True"]
        return values[0] if len(values) == 1 else as_text(values)

    def is_on(self, name: str) -> bool:
        """Whether the flag is given, or by default, and not as false."""
        return self.value(name).lower() not in ("", "false", "0")

    def number(self, name: str, default: float | None = None) -> float:
        """The flag's value as a number; a variable that is not set is refused."""
        text = self.value(name, "" if default is None else str(default))
        try:
            return float(text)
        except ValueError:
            raise ConfigError(
                f"{self.spelled(name)} is {text!r}: this figure is computed with others, so "
                "set its variable: NAME=... verl-like migrate ..."
            ) from None

    def count(self, name: str, default: int | None = None) -> int:
        """The flag's value as a whole number."""
        return int(self.number(name, default))

    def ours(self, name: str) -> str:
        """Our word for its value, of a row with `values`."""
        row = self._table.rows[name]
        return as_text(self._in_our_words(name, row, self.value(name)))

    def spelled(self, name: str) -> str:
        """The flag as the command has it."""
        return f"{self._dashes}{self._spelled.get(name, name)}"

    def becomes(self, name: str, settings: Mapping[str, Any]) -> None:
        """The flag, if it is there, becomes these settings."""
        if self.has(name):
            self._told.add(name)
            self.done.rename(self._with_value(name), settings)

    def becomes_or_is(self, name: str, default: Any, settings: Mapping[str, Any]) -> None:
        """The flag, or its default where it is not there, becomes these settings."""
        self.becomes(name, settings)
        if not self.has(name):
            self.done.default(self.spelled(name), default, settings)

    def finish(self) -> Translation:
        """What no rule has told, by the table, then the defaults of the rows."""
        unknown, no_such_value = [], set()
        for name in self._values:
            row = self._table.find(name)
            if row is None:
                unknown.append(name)
            elif name not in self._told and not self._by_row(name, row):
                no_such_value.add(name)
        if unknown:
            listed = ", ".join(map(self.spelled, unknown))
            hints = " ".join(nearest(name, self._table.known()).strip() for name in unknown)
            raise ConfigError(f"{self._unknown} {listed}. {hints}".rstrip())

        for name, row in self._table.rows.items():
            if row.default and row.settings and self._is_read(row):
                if not self.has(name) or name in no_such_value:
                    settings = self._settings(name, row, row.default)
                    self.done.default(self.spelled(name), row.default, settings)
        return self.done

    def _by_row(self, name: str, row: Row) -> bool:
        """Translate the flag; False where its value has no counterpart."""
        told, value = self._with_value(name), self.value(name)
        if not self._is_read(row) or _is_one_of(value, row.at):
            self.done.joined.append(told)
        elif row.always:
            self.done.always.append(f"{told}: {row.always}")
        elif row.absent:
            self.done.absent.append(f"{told}: {row.absent}")
        elif row.refused:
            self.done.refused.append(f"{told}: {row.refused}")
        elif row.otherwise and value.lower() not in row.values:
            self.done.refused.append(f"{told}: {row.otherwise}")
            return False
        elif row.settings:
            self.becomes(name, self._settings(name, row, value))
        else:
            self.done.joined.append(told)
        return True

    def _settings(self, name: str, row: Row, value: str) -> Mapping[str, str]:
        ours = self._in_our_words(name, row, value)
        if isinstance(ours, Mapping):
            return ours

        def filled(match: re.Match[str]) -> str:
            which = match[1]
            if not which:
                return str(ours)
            return self.values(name)[int(which)] if which.isdigit() else self.value(which)

        return {key: PLACEHOLDER.sub(filled, str(text)) for key, text in row.settings.items()}

    def _in_our_words(self, name: str, row: Row, value: str) -> str | Mapping[str, str]:
        if row.only and value.lower() not in row.values:
            raise ConfigError(f"{self.spelled(name)} {value}: {row.only}.")
        return row.values.get(value.lower(), value)

    def _is_read(self, row: Row) -> bool:
        if row.needs.startswith("not "):
            return not self.is_on(row.needs.removeprefix("not "))
        name, has_value, value = row.needs.partition("=")
        return not name or (self.value(name) == value if has_value else self.is_on(name))

    def _with_value(self, name: str) -> str:
        return " ".join([self.spelled(name), *self._values[name]])


def _is_one_of(value: str, patterns: tuple[str, ...]) -> bool:
    value = value.lower()
    return any(value == each.lower() or fnmatchcase(value, each.lower()) for each in patterns)
