"""The translation of a foreign command line: this project's settings, and a line per flag."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config.settings import as_text as quoted_text
from trainer.config.settings import parse
from verl_like.errors import ConfigError
from verl_like.terminal import printable


@dataclass
class Translation:
    """Settings of this project, and the outcome of each flag."""

    program: str = "ppo"
    """This project's command."""
    places: Mapping[str, str] = field(default_factory=dict)
    """Prefix of a key in the rules -> its prefix in the recipe of this command."""
    settings: dict[str, str] = field(default_factory=dict)
    """Key -> value as on the command line."""
    defaults: dict[str, str] = field(default_factory=dict)
    """Key -> the other framework's default, which the command sets because ours differs."""
    renamed: list[str] = field(default_factory=list)
    """Flag -> its name here."""
    joined: list[str] = field(default_factory=list)
    """Flags that a line about another flag covers, or that have no effect in the translated run."""
    unread: list[str] = field(default_factory=list)
    """Settings that nothing in the translated run would read; the command leaves them out."""
    always: list[str] = field(default_factory=list)
    """Flags that request something that always holds in this project."""
    absent: list[str] = field(default_factory=list)
    """Flags without a counterpart, with what to do instead; the experiment is the same."""
    rejected: list[str] = field(default_factory=list)
    """Flags whose absence would change the experiment, so there is no translation."""
    environment: list[str] = field(default_factory=list)
    """`NAME=value` that the script sets for the run."""
    notices: list[str] = field(default_factory=list)
    """Notes on how the script ran."""
    incomplete: list[str] = field(default_factory=list)
    """Additions that the command needs before it can run."""
    variables: Collection[str] = ()
    """Shell variables that stay variables in the command; any other `$` is literal."""
    original: Mapping[str, str] = field(default_factory=dict)
    """Flags or keys of the translated command -> their values."""
    source: Sequence[str] = ()
    """The words of the translated command."""

    def rename(self, described: str, settings: Mapping[str, Any]) -> None:
        """Translate a flag of the user, described by `described`, to these settings."""
        ours = self._placed(settings)
        self.settings |= ours
        for key in ours:
            self.defaults.pop(key, None)
        if described != " ".join(f"{k} {v}" for k, v in ours.items()):
            self.renamed.append(f"{described} -> {', '.join(f'{k}={v}' for k, v in ours.items())}")

    def default(self, flag: str, value: Any, settings: Mapping[str, Any]) -> None:
        """Set a default of the other framework, unless the user set the key."""
        for key, text in self._placed(settings).items():
            if key not in self.settings:
                self.settings[key] = text
                self.defaults[key] = f"{flag}: {value}"

    def leave_out(self, key: str, reason: str) -> None:
        """Drop a setting that nothing reads; a default of the other framework gets no line."""
        value = self.settings.pop(key)
        if self.defaults.pop(key, None) is None:
            self.unread.append(f"{key}={value}: {reason}")

    def overrides(self) -> list[str]:
        """Return the settings as arguments of `load_config`."""
        return [f"{key}={value}" for key, value in self.settings.items()]

    def command(self) -> str:
        """Return the settings as a command for a shell."""
        words = [shell_word(word, self.variables) for word in self.overrides()]
        return " \\\n    ".join([f"verl-like {self.program}", *words])

    def report(self) -> str:
        """Return a script for bash: the command, then the lists that are not empty, as comments.

        If the command needs an addition, the first line says so.
        """
        defaults: dict[str, list[str]] = {}
        for key, flag in self.defaults.items():
            defaults.setdefault(flag, []).append(f"{key}={self.settings[key]}")
        paragraphs = {
            "Renamed": self.renamed,
            "Defaults of the other framework that differ": [
                f"{flag} -> {', '.join(ours)}" for flag, ours in defaults.items()
            ],
            "Part of the above, or without effect in that run": self.joined,
            "Dropped: no effect in this run": self.unread,
            "Built-in behavior": self.always,
            "Not supported": self.absent,
            "Environment variables of the script; export those that you need": self.environment,
            "Notice": self.notices,
        }
        described = [
            commented("\n".join([f"{title}:", *(f"  {line}" for line in lines)]))
            for title, lines in paragraphs.items()
            if lines
        ]
        missing = [commented(f"incomplete: {line}") for line in self.incomplete]
        return "\n\n".join(["\n".join([*missing, self.command()]), *described])

    def _placed(self, settings: Mapping[str, Any]) -> dict[str, str]:
        placed = {}
        for key, value in settings.items():
            start = next((start for start in self.places if key.startswith(start)), "")
            ours = self.places[start] + key.removeprefix(start) if start else key
            placed[ours] = as_setting(as_text(value))
        return placed


def commented(text: str) -> str:
    """Return the text as comments of bash."""
    return "\n".join(f"# {line}".rstrip() for line in printable(text).splitlines())


def shell_word(word: str, variables: Collection[str]) -> str:
    """Return the word for bash, in which these variables stay variables."""
    names = "|".join(map(re.escape, variables))
    of_the_shell = rf"(\$(?:{names})(?!\w)|\$\(\([\w*/+ -]*\)\))"
    segments = re.split(of_the_shell, word) if names else [word]
    if len(segments) == 1:
        is_plain = "'" in word and not re.search(r'["$`!\\]', word)
        return f'"{word}"' if is_plain else shlex.quote(word)
    segments[::2] = [re.sub(r'([\\"`$])', r"\\\1", segment) for segment in segments[::2]]
    return f'"{"".join(segments)}"'


def as_setting(text: str) -> str:
    """Return the text for the parser of settings, quoted if necessary."""
    if text.startswith("$(("):  # the shell computes the value
        return text
    try:
        if not parse(f"x={text}").is_sweep_override():
            return text
    except ConfigError:
        pass
    return quoted_text(text, "x")


def as_text(value: Any) -> str:
    """Return a value in the syntax of an override."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(as_text, value))}]"
    return str(value)
