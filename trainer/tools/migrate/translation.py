"""The translation of a foreign command line: flags, the rules that translate them, and a report.

    flags = CommandFlags(Table("trl", "all", "sft"), as_flags(words), "TRL's sft has no field")
    flags.becomes("zero_stage", {"actor_rollout_ref.actor.strategy": "fsdp"})     # a rule in code
    done = flags.finish()                                                         # rules, then rows

A table is a YAML file in this folder, such as `trl.yaml`, with a row for each flag:

    name other_name: {always: "built-in behavior, whatever the value"}
    name: some.key                                  # the key here with the same meaning
    name: {key: some.key, values: {theirs: ours}}   # a value may become several settings
    name: {set: {some.key: "{}", other.key: "{1}", third.key: "{other}", fourth.key: "{a / b}"}}

`{}` is the flag's value, `{1}` the second of several values, `{other}` the value of another flag.
Anything else in braces is a Python expression over the values of flags; a flag that is not
given has its `default` or None. A name may contain `*`. A row may also have:

    new         a later spelling
    default     their default, which is set here if the flag is missing
    needs       an expression: the flag is ignored unless it is true
    at          values at which the flag changes nothing
    otherwise   why values that are not in `values` are rejected
    absent      no equivalent: what to do instead; the experiment is the same without the flag
    incomplete  no equivalent: what to do before the command starts
    rejected    no equivalent, and the experiment would be different without the flag
    with        a rule translates the flag, together with others, into these keys

Rules translate several flags together. They are the list `rules` of a section and apply before the
rows, in their order, each only if the expression `when` is true. A rule may have:

    let         name -> expression, for this rule and all later ones
    set         settings, as in a row
    of          flags that become these settings if they are given
    described   the source of these settings, if it is not a flag
    theirs      their default: the settings also apply if none of the flags is given
    row         a flag that its row translates at this point
    drop        keys that this rule handles; a name may contain `*`
    dropped     the message for each dropped key
    always, absent, incomplete, rejected, error     a message with values in braces
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from trainer.config.settings import as_text as quoted_text
from trainer.config.settings import parse
from verl_like.errors import ConfigError, nearest
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


Flags = dict[str, list[str]]
"""Flag without its dashes -> its values; an empty list if it has none."""
NUMBER = re.compile(r"-\.?\d")
IN_BRACES = re.compile(r"\{([^{}]*)\}")
NAME = re.compile(r"'[^']*'|(?<![\w.])[A-Za-z_][\w.]*")
"""A text or a name in an expression."""
KINDS = ("always", "absent", "incomplete", "rejected")
"""Kinds of messages about flags without settings: lists of a `Translation`."""
PYTHON_WORDS = ("and", "or", "not", "in", "if", "else", "is", "None", "True", "False")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{item.__name__: item for item in (float, int, len, max, min, round, str, math.ceil)},
    "numbers": lambda *values: all(isinstance(value, (int, float)) for value in values),
    "listed": lambda value: str(value).strip("[]").split(","),
}


def find_program(
    words: Sequence[str], is_program: Callable[[str], bool], unnamed: str | None = None
) -> tuple[list[str], str, list[str]] | None:
    """Return the words before the program, its name as a module, and the words after it.

    Words that begin with a flag and name no program belong to `unnamed`. Return None if there is
    no program.
    """
    for place, word in enumerate(words):
        name = word.removesuffix(".py").removeprefix("./").replace("/", ".").lstrip(".")
        if not word.startswith("-") and is_program(name):
            return list(words[:place]), name, list(words[place + 1 :])
    return ([], unnamed, list(words)) if unnamed is not None and words[0][:2] == "--" else None


def last_name(program: str) -> str:
    """Return `train` for `package.train`."""
    return program.rpartition(".")[2]


def as_flags(words: Sequence[str]) -> Flags:
    """Return flags and their values, in the order of the words."""
    flags: Flags = {}
    values = list[str]()
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, has_value, value = word[2:].partition("=")
            values = flags[name] = [value] if has_value else []
        elif word.startswith("-") and not NUMBER.match(word):
            values = []  # an option of the launcher
        else:
            values.append(word)
    return flags


def num_processes(launcher: Sequence[str]) -> str:
    """Return the number of processes that a launcher such as `torchrun` starts, or ""."""
    names = ("num_processes", "nproc_per_node", "num_gpus")
    flags = {name.replace("-", "_"): values for name, values in as_flags(launcher).items()}
    return next((flags[name][0] for name in names if flags.get(name)), "")


class Text(str):
    """A value that is not a number; `"$N" * 2` raises an error."""

    __mul__ = __rmul__ = __mod__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class FlagRow:
    """The translation of one flag."""

    settings: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str | Mapping[str, str]] = field(default_factory=dict)
    at: tuple[str, ...] = ()
    new: str = ""
    default: str = ""
    needs: str = ""
    otherwise: str = ""
    always: str = ""
    absent: str = ""
    incomplete: str = ""
    rejected: str = ""
    taken_with: str = ""

    @classmethod
    def from_fields(cls, fields: str | Mapping[str, Any]) -> FlagRow:
        """Return the row of a YAML entry."""
        fields = {"key": fields} if isinstance(fields, str) else dict(fields)
        settings = {fields.pop("key"): "{}"} if "key" in fields else fields.pop("set", {})
        values = {str(theirs).lower(): ours for theirs, ours in fields.pop("values", {}).items()}
        at, taken_with = map(str, fields.pop("at", ())), fields.pop("with", "")
        texts = {name: str(value) for name, value in fields.items()}
        return cls(settings, values, tuple(at), taken_with=taken_with, **texts)


class Table:
    """The rows and rules of a system, or of sections of it."""

    def __init__(self, system: str, *sections: str) -> None:
        tree = read_table(system)
        self.rows: dict[str, FlagRow] = {}
        self.rules: list[Mapping[str, Any]] = []
        for section in [tree[name] for name in sections] if sections else [tree]:
            self.rules += section.get("rules", [])
            for names, fields in section.items():
                if names != "rules":
                    self.rows |= dict.fromkeys(names.split(), FlagRow.from_fields(fields))
        self.older = {row.new: name for name, row in self.rows.items() if row.new}
        """A newer spelling of a flag -> its name in the table."""

    def find(self, name: str) -> FlagRow | None:
        """Return the row of that name, or of a pattern that matches the name, or None."""
        return self.rows.get(name) or next(
            (row for pattern, row in self.rows.items() if fnmatchcase(name, pattern)), None
        )


@cache
def read_table(system: str) -> dict[str, Any]:
    """Return the YAML of that system."""
    text = (Path(__file__).parent / f"{system}.yaml").read_text(encoding="utf-8")
    tree: dict[str, Any] = yaml.safe_load(text)
    return tree


class CommandFlags:
    """Flags of one command, by the names of the table, and their translation so far."""

    def __init__(
        self,
        table: Table,
        flags: Flags,
        unknown: str = "",
        done: Translation | None = None,
        dashes: str = "--",
        figures: Mapping[str, Any] | None = None,
    ) -> None:
        """`unknown` begins the message about flags that the table does not have.

        `figures` are further names for expressions, as `let` defines them.
        """
        self.done = done or Translation()
        self._table, self._unknown, self._dashes = table, unknown, dashes
        self._spelled = {table.older.get(name, name): name for name in flags}
        self._values = {table.older.get(name, name): values for name, values in flags.items()}
        self._figures = dict(figures or {})
        self._reported: set[str] = set()

    def has(self, name: str) -> bool:
        """Return whether the command has the flag."""
        return name in self._values

    def values(self, name: str) -> list[str]:
        """Return the flag's values; [] if the command does not have the flag."""
        return self._values.get(name, [])

    def value(self, name: str, default: str = "") -> str:
        """Return the flag's value or its default: True without a value, a list for several."""
        if name not in self._values:
            row = self._table.find(name)
            theirs = row.default if row else ""
            return default or (self._filled(theirs) if theirs[:1] == "{" else theirs)
        values = self._values[name] or ["True"]
        return values[0] if len(values) == 1 else as_text(values)

    def figure(self, name: str) -> Any:
        """Return the flag's value for an expression: a number, a bool, a text or None."""
        if name in self._figures:
            return self._figures[name]
        text = self.value(name)
        if text.lower() in ("", "null", "none", "true", "false"):
            return {"true": True, "false": False}.get(text.lower())
        try:
            return float(text) if set(text.lower()) & set(".en") else int(text)
        except ValueError:
            return Text(text)

    def count(self, name: str) -> int:
        """Return the flag's value as a whole number."""
        return int(self.computed(f"int(0 + {name})"))

    def spelled(self, name: str) -> str:
        """Return the flag as the command spells it."""
        return f"{self._dashes}{self._spelled.get(name, name)}"

    def becomes(self, name: str, settings: Mapping[str, Any]) -> None:
        """Translate the flag, if it is given, to these settings."""
        if self.has(name):
            self._reported.add(name)
            self.done.rename(self._with_value(name), settings)

    def finish(self) -> Translation:
        """Apply the rules, then the rows of the other flags, then the defaults of rows."""
        unknown = [name for name in self._values if self._table.find(name) is None]
        if unknown:
            known = [*self._table.rows, *self._table.older]
            hints = " ".join(nearest(name, known).strip() for name in unknown)
            listed = ", ".join(map(self.spelled, unknown))
            raise ConfigError(f"{self._unknown} {listed}. {hints}".rstrip())
        self.apply(self._table.rules)
        for name in [*self._values, *self._table.rows]:
            self._by_row(name)
        return self.done

    def apply(self, rules: Sequence[Mapping[str, Any]], keys: dict[str, Any] | None = None) -> None:
        """Apply rules that take several flags together; `keys` loses those that a rule drops."""
        for rule in rules:
            if self.computed(str(rule.get("when", "True"))):
                self._by_rule(rule, {} if keys is None else keys)

    def _by_rule(self, rule: Mapping[str, Any], keys: dict[str, Any]) -> None:
        """Apply a rule whose condition holds."""
        for name, expression in rule.get("let", {}).items():
            self._figures[name] = self.computed(expression)
        if "error" in rule:
            raise ConfigError(self._filled(rule["error"]))
        for kind in KINDS:
            if kind in rule:
                getattr(self.done, kind).append(self._filled(rule[kind]))
        if "row" in rule:
            self._by_row(rule["row"])
        flags = rule.get("of", "").split()
        settings = {key: self._filled(str(text)) for key, text in rule.get("set", {}).items()}
        for name in flags:
            self.becomes(name, settings)
        described = self._filled(rule.get("described", ""))
        if "theirs" in rule and not any(map(self.has, flags)):
            theirs = self._filled(str(rule["theirs"]))
            self.done.default(described or self.spelled(flags[0]), theirs, settings)
        elif described:
            self.done.rename(described, settings)
        for key in [key for key in keys if _fits(key, rule.get("drop", ()))]:
            value = keys.pop(key)
            if "dropped" in rule:
                self.done.absent.append(f"{key}={value}: {rule['dropped']}")

    def _by_row(self, name: str) -> None:
        """Translate a flag, or its default if it is not given, by its row."""
        row, done = self._table.find(name), self.done
        if row is None or name in self._reported:
            return
        self._reported.add(name)
        is_read = not row.needs or self.computed(row.needs)
        if not self.has(name):
            if row.default and row.settings and is_read:
                value = self.value(name)
                done.default(self.spelled(name), value, self._settings(name, row, value))
            return
        described, value = self._with_value(name), self.value(name)
        changes_nothing = _fits(value.lower(), [item.lower() for item in row.at])
        if changes_nothing or not is_read or row.taken_with:
            done.joined.append(described)
        elif row.otherwise and value.lower() not in row.values:
            done.rejected.append(f"{described}: {row.otherwise}")
        elif row.settings:
            done.rename(described, self._settings(name, row, value))
        else:
            kind = next(kind for kind in KINDS if getattr(row, kind))
            getattr(done, kind).append(f"{described}: {getattr(row, kind)}")

    def _settings(self, name: str, row: FlagRow, value: str) -> Mapping[str, str]:
        ours = row.values.get(value.lower(), value)
        if isinstance(ours, Mapping):
            return ours
        return {key: self._filled(str(text), name, ours) for key, text in row.settings.items()}

    def _filled(self, template: str, name: str = "", ours: str = "") -> str:
        def fill(match: re.Match[str]) -> str:
            expression = match[1]
            if expression.isdigit():
                return self.values(name)[int(expression)]
            if not expression or (self.has(expression) and expression not in self._figures):
                return self.value(expression) if expression else ours
            result = self.computed(expression)
            return str(round(result, 10)) if isinstance(result, float) else as_text(result)

        return IN_BRACES.sub(fill, template)

    def computed(self, expression: str) -> Any:
        """Return the value of a Python expression whose names are flags."""

        def ours(name: str) -> Any:
            value = self.value(name)
            return self._table.rows[name].values.get(value.lower(), value)

        def whole_number(number: float) -> int:
            if number != int(number):
                raise ConfigError(
                    f"{expression} is {number:g}, but must be a whole number of groups. Set "
                    "train_batch_size to a multiple of n_samples_per_prompt."
                )
            return int(number)

        functions = {**FUNCTIONS, "given": self.has, "ours": ours, "whole": whole_number}

        def look_up(match: re.Match[str]) -> str:
            name = match[0]
            is_flag = name[0] != "'" and name not in functions and name not in PYTHON_WORDS
            return f"figure({name!r})" if is_flag else name

        code = NAME.sub(look_up, str(expression))
        try:
            return eval(code, {"__builtins__": {}, "figure": self.figure, **functions})
        except TypeError as err:
            names = [n for n in NAME.findall(expression) if isinstance(self.figure(n), str)]
            listed = ", ".join(f"{self.spelled(n)} is {self.figure(n)!r}" for n in names)
            raise ConfigError(
                f"{listed or expression}: other settings are computed from this value. Set the "
                "variable that it contains: NAME=... verl-like migrate ..."
            ) from err

    def _with_value(self, name: str) -> str:
        return " ".join([self.spelled(name), *self.values(name)])


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)
