"""The flags of one command, by their older names, and what becomes of those that stand alone."""

from __future__ import annotations

from typing import Any

from trainer.migrate.command import Flags
from trainer.migrate.openrlhf.flags import ABSENT, ALWAYS, IF_ONE, NEW_NAMES, RENAMED
from trainer.migrate.translation import Translation, as_number
from verl_like.errors import ConfigError, nearest


class GivenFlags:
    """The flags of a command by their older names; which of them were looked at is remembered."""

    def __init__(self, given: Flags) -> None:
        self._spelled: dict[str, str] = {}
        self._values: Flags = {}
        for name, values in given.items():
            old = NEW_NAMES.get(name, name)
            self._spelled[old], self._values[old] = name, values
        self._seen: set[str] = set()
        self._ignored: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the command has the flag."""
        self._seen.add(name)
        return name in self._values

    def values(self, name: str) -> list[str]:
        """The flag's values, none where the command has no such flag."""
        self._seen.add(name)
        return self._values.get(name, [])

    def value(self, name: str, default: str) -> str:
        """Its one value, or OpenRLHF's default."""
        return (self.values(name) or [default])[0]

    def number(self, name: str, default: float) -> float:
        """Its one value as a number; a shell variable has none."""
        return as_number(self.spelled(name), self.value(name, str(default)))

    def count(self, name: str, default: int) -> int:
        """The same as a whole number."""
        return int(self.number(name, default))

    def spelled(self, name: str) -> str:
        """The flag as the command has it, or by its older name."""
        return f"--{self._spelled.get(name, name)}"

    def becomes(self, done: Translation, name: str, settings: dict[str, Any]) -> None:
        """The flag, if it is there, becomes these settings."""
        if self.has(name):
            done.rename(self.spelled(name), self._values[name], settings)

    def defaults_to(self, done: Translation, name: str, value: Any, *keys: str) -> None:
        """Where the flag is not there, its default is set for these keys of ours."""
        if not self.has(name):
            done.default(self.spelled(name), value, dict.fromkeys(keys, value))

    def ignore(self, *names: str) -> None:
        """These flags have no effect in that run."""
        self._seen.update(names)
        self._ignored.update(names)

    def tell_the_rest(self, done: Translation) -> None:
        """What no section has looked at, by the tables."""
        unknown = []
        for name, values in self._values.items():
            flag = " ".join([self.spelled(name), *values])
            if name in self._ignored:
                done.joined.append(flag)
            elif name in RENAMED:
                self.becomes(done, name, {RENAMED[name]: self.value(name, "True")})
            elif name in ALWAYS:
                done.always.append(f"{flag}: {ALWAYS[name]}")
            elif name in IF_ONE and values == ["1"]:
                done.joined.append(flag)
            elif name in ABSENT or name in IF_ONE:
                done.absent.append(f"{flag}: {(ABSENT | IF_ONE)[name]}")
            elif name not in self._seen:
                unknown.append(self.spelled(name))
            elif not done.tells(self.spelled(name)):
                done.joined.append(flag)
        if unknown:
            known = {*NEW_NAMES, *NEW_NAMES.values(), *RENAMED, *ALWAYS, *ABSENT}
            hints = " ".join(nearest(flag.removeprefix("--"), known).strip() for flag in unknown)
            raise ConfigError(f"train_ppo_ray has no flag {', '.join(unknown)}. {hints}".rstrip())

    @property
    def has_critic(self) -> bool:
        """Whether their run trains a critic."""
        return self.value("advantage_estimator", "gae") == "gae"
