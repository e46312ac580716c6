"""What became of a foreign command line: our settings, and a word on every flag."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import Any

from verl_like.errors import ConfigError
from verl_like.terminal import fit


@dataclass
class Translation:
    """Settings of ours, and what happened to each flag, in the order of the flags."""

    program: str = "ppo"
    """The command of ours that runs it."""
    settings: dict[str, str] = field(default_factory=dict)
    """Key -> value as it stands on the command line."""
    renamed: list[str] = field(default_factory=list)
    """Flag -> what it is called here."""
    defaults: list[str] = field(default_factory=list)
    """Their defaults that differ from ours, which the command therefore sets."""
    always: list[str] = field(default_factory=list)
    """Flags that ask for what is always so here."""
    absent: list[str] = field(default_factory=list)
    """Flags that have no counterpart, with what to do instead."""

    joined: list[str] = field(default_factory=list)
    """Flags that a line about another one covers, or that do nothing in that run."""

    unread: list[str] = field(default_factory=list)
    """Settings that nothing would read in that run, left out of the command."""

    def tells(self, flag: str) -> bool:
        """Whether a line is about the flag."""
        lines = [*self.renamed, *self.always, *self.absent]
        return any(word.rstrip(":,") == flag for line in lines for word in line.split())

    def set(self, key: str, value: Any) -> None:
        """A setting of ours."""
        self.settings[key] = _text(value)

    def rename(self, flag: str, values: list[str], settings: dict[str, Any]) -> None:
        """A flag that the user gave becomes these settings."""
        for key, value in settings.items():
            self.set(key, value)
        ours = ", ".join(f"{key}={_text(value)}" for key, value in settings.items())
        self.renamed.append(f"{' '.join([flag, *values])} -> {ours}")

    def default(self, flag: str, value: Any, settings: dict[str, Any]) -> None:
        """A default of theirs that is another one here."""
        new = {key: _text(ours) for key, ours in settings.items() if key not in self.settings}
        if new:
            self.settings.update(new)
            ours = ", ".join(f"{key}={text}" for key, text in new.items())
            self.defaults.append(f"{flag} is {value} there -> {ours}")

    def overrides(self) -> list[str]:
        """The settings as `load_config` takes them."""
        return [f"{key}={value}" for key, value in self.settings.items()]

    def command(self) -> str:
        """The settings as a command for a shell; variables of the script stay variables."""
        words = [f"{key}={value}" for key, value in self.settings.items()]
        return " \\\n    ".join([f"verl-like {self.program}", *map(_quoted, words)])

    def report(self, width: int | None) -> str:
        """The command, then a paragraph for every kind of flag that there is."""
        parts = [self.command()]
        for title, lines in (
            ("Renamed", self.renamed),
            ("Their defaults that differ from ours", self.defaults),
            ("Part of the above, or without effect in that run", self.joined),
            ("Left out, as nothing reads it in that run", self.unread),
            ("Always so here", self.always),
            ("Not here", self.absent),
        ):
            if lines:
                parts.append("\n".join([f"{title}:", *(f"  {line}" for line in lines)]))
        return "\n\n".join([parts[0], *(fit(part, width) for part in parts[1:])])


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(_text, value))}]"
    return str(value)


def _quoted(word: str) -> str:
    """Quoted for a shell where it must be; what has a variable is in double quotes."""
    if "$" in word:
        return f'"{word}"'
    return shlex.quote(word)


def as_number(name: str, text: str) -> float:
    """The value of a flag as a number; a shell variable has none."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"{name} is {text!r}: this figure is computed with others, so replace the shell "
            "variable by its number."
        ) from None
