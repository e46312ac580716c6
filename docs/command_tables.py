"""Lists of the commands and their options, from the help texts."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Sequence

from trainer.cli import main as main_command
from trainer.cli.main import COMMANDS, RECIPES, command_help

USAGE_OR_OPTION = re.compile(r"^(?:usage: |  --).*\n(?: {4,}.*\n)*", re.M)
"""Matches a usage or an option in a help text, with the lines that continue it."""
OPTIONAL = re.compile(r" \[(--[\w-]+)((?:[^][]|\[[^][]*\])*)\]")
"""Matches an optional option in a usage, as its name and its argument."""


def command_list() -> str:
    """Return what `verl-like --help` prints."""
    return f"```text\n{inspect.getdoc(main_command)}\n```"


def command_options() -> str:
    """Return the usages and the listed options of every command that is not a recipe.

    A command without options is left out, because the list of commands has its usage.
    """
    commands = re.findall(r"^  (\S+ .*?)(?:  |$)", inspect.getdoc(main_command) or "", re.M)
    parts = []
    for name in sorted({*COMMANDS} - {*RECIPES}):
        text = f"{command_help(name)}\n"
        lines = [found[0].rstrip() for found in USAGE_OR_OPTION.finditer(text)]
        options = [line for line in lines if line.startswith("  --")]
        lines = [line if line in options else short_usage(line, options) for line in lines]
        usage = "\n".join(lines).removeprefix("\n")
        if usage not in (f"verl-like {command}" for command in [*commands, name]):
            parts.append(f"### `{name}`\n\n```text\n{usage}\n```")
    return "\n\n".join(parts)


def short_usage(line: str, options: Sequence[str]) -> str:
    """Return a usage with `[options]` instead of the options that are listed with their choices."""

    def shown(option: re.Match[str]) -> str:
        name, argument = option.groups()
        listed = name + argument if "|" in argument else name
        is_listed = any(re.match(rf"  {re.escape(listed)}( |$)", line) for line in options)
        return "" if is_listed else option[0]

    usage = " ".join(line.removeprefix("usage: ").split())
    words = OPTIONAL.sub(shown, usage).removesuffix(KEYS)
    words += " [options]" * bool(options) + KEYS * usage.endswith(KEYS)
    words = re.sub(r"\[[^]]*]", lambda found: found[0].replace(" ", "\0"), words)  # no breaks
    lines = textwrap.wrap(words, 80, subsequent_indent=" " * 11, break_on_hyphens=False)
    return "\n" + "\n".join(lines).replace("\0", " ")


KEYS = " [key=value ...]"
