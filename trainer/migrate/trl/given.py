"""The fields of one TRL run, and what becomes of those that stand alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from trainer.migrate.translation import Translation, as_number
from trainer.migrate.trl.flags import (
    ABSENT,
    ABSENT_IN,
    ALWAYS,
    DEFAULTS,
    DEFAULTS_IN,
    PLACES,
    RENAMED,
    RENAMED_IN,
    TOGETHER,
    TOGETHER_IN,
)
from verl_like.errors import ConfigError, nearest


class GivenFields:
    """The fields that a run sets."""

    def __init__(self, program: str, values: Mapping[str, str]) -> None:
        self.program = program
        self._values = dict(values)
        self._ignored: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the run sets it."""
        return name in self._values

    def value(self, name: str, default: str) -> str:
        """Its value, or TRL's default."""
        return self._values.get(name, default)

    def number(self, name: str, default: float) -> float:
        """Its value as a number; a shell variable has none."""
        return as_number(name, self.value(name, str(default)))

    def count(self, name: str, default: int) -> int:
        """The same as a whole number."""
        return int(self.number(name, default))

    def place(self, key: str) -> str:
        """Where the recipe of this command has a key of the recipes on rows."""
        if self.program == "grpo":
            for beginning, ours in PLACES.items():
                if key.startswith(beginning):
                    return ours + key.removeprefix(beginning)
        return key

    def becomes(self, done: Translation, name: str, settings: Mapping[str, Any]) -> None:
        """The field, if it is there, becomes these settings."""
        if self.has(name):
            done.rename(f"{name}={self._values[name]}", [], dict(settings))

    def ignore(self, *names: str) -> None:
        """These fields are part of another one's settings, or have no effect in that run."""
        self._ignored.update(names)

    def tell_the_rest(self, done: Translation) -> None:
        """Fields by the tables, then their defaults that are others here."""
        alone = RENAMED | RENAMED_IN[self.program]
        absent = ABSENT | ABSENT_IN[self.program]
        together = TOGETHER | TOGETHER_IN[self.program]
        unknown = []
        for name, value in self._values.items():
            told = f"{name}={value}"
            if name in self._ignored:
                done.joined.append(told)
            elif name in alone:
                done.rename(told, [], {self.place(alone[name]): value})
            elif pattern := _found(name, ALWAYS):
                done.always.append(f"{told}: {ALWAYS[pattern]}")
            elif pattern := _found(name, absent):
                done.absent.append(f"{told}: {absent[pattern]}")
            elif name not in together:
                unknown.append(name)
            elif not any(name in line for line in [*done.renamed, *done.absent, *done.joined]):
                done.joined.append(told)
        if unknown:
            known = [*alone, *together, *ALWAYS, *absent]
            hints = " ".join(nearest(name, known).strip() for name in unknown)
            raise ConfigError(
                f"TRL's {self.program} has no field {', '.join(unknown)}. {hints}".rstrip()
            )

        for name, theirs in (DEFAULTS | DEFAULTS_IN[self.program]).items():
            done.default(name, theirs, {self.place(alone[name]): theirs})


def _found(name: str, patterns: Iterable[str]) -> str:
    """The pattern that the name fits; "" where there is none."""
    return next((pattern for pattern in patterns if fnmatchcase(name, pattern)), "")
