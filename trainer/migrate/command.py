"""A command line or a shell script, read into the flags that a program gets.

    program, words = read_words(Path("train.sh").read_text(), "train_ppo_ray")
    flags = as_flags(words)
    flags["gamma"]                                   # ["1.0"]; [] where a flag stands alone

Variables of the shell stay as they are written (`$MODEL`), so that the translation can stand in the
same script; the translated run is checked with the values that the script gives them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from verl_like.errors import ConfigError

Flags = dict[str, list[str]]
"""Flag without its dashes -> its values."""
NUMBER = re.compile(r"-\.?\d")
ENDS = {";", "&&", "||", "|", "&", ">", ">>", "<", "2>", "2>&1"}
"""Words after which a command is over."""
CONTINUATION = re.compile(r"\\[ \t]*(?:#[^\n]*)?\n")
"""A backslash at the end of a line, or before a comment, as papers print commands."""
LINE_NUMBER = re.compile(r"^[ \t]*(\d+)[ \t]+(?=--)", re.M)
ASSIGNMENT = re.compile(r"\s*(?:export\s+)?(?P<name>[A-Za-z_]\w*)=(?P<value>.*)")
REFERENCE = re.compile(
    r"\$(?:(?P<plain>[A-Za-z_]\w*)|\{(?P<braced>\w+)(?::?-(?P<default>[^}]*))?\})"
)


def read_words(text: str, *programs: str) -> tuple[str, list[str]]:
    """The first of `programs` that a command of the text runs, and the words after it.

    The text may be these words alone; then the program is "".
    """
    commands = commands_of(text)
    for words in commands:
        for place, word in enumerate(words):
            program = re.split(r"[./]", word.removesuffix(".py"))[-1]
            if program in programs:
                return program, words[place + 1 :]
    if len(commands) == 1 and all(word.startswith("--") or "=" in word for word in commands[0][:1]):
        return "", commands[0]
    raise ConfigError(
        f"no command that runs {' or '.join(programs)} is in the text; give a script or a command "
        "line that runs it, or its settings alone."
    )


def num_processes(text: str) -> str:
    """Processes that `torchrun` or `accelerate launch` starts; "" where the text does not say."""
    for words in commands_of(text):
        for flag, values in as_flags(words).items():
            name = flag.replace("-", "_")
            if name in ("num_processes", "nproc_per_node") and values:
                return values[0]
    return ""


def commands_of(text: str) -> list[list[str]]:
    """The words of every command; a line that ends with a backslash goes on in the next."""
    joined = CONTINUATION.sub(" ", _without_line_numbers(text))
    commands = []
    for line in _lines(joined):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise ConfigError(f"the shell could not read {line.strip()!r:.80}: {error}.") from error
        current: list[str] = []
        for word in words:
            if word in ENDS or word.endswith(";"):
                current.append(word.rstrip(";"))
                commands.append([word for word in current if word and word not in ENDS])
                current = []
            else:
                current.append(word)
        commands.append(current)
    return [words for words in commands if words]


def _without_line_numbers(text: str) -> str:
    """Without the numbers that a listing has before its lines: 2, 3, 4, ..."""
    numbers = [int(number) for number in LINE_NUMBER.findall(text)]
    is_counted = len(numbers) > 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return LINE_NUMBER.sub("", text) if is_counted else text


def _lines(text: str) -> list[str]:
    """Lines, but for those inside quotes: `read -r -d '' cmd <<EOF` and the like hold commands."""
    lines: list[str] = []
    for line in text.splitlines():
        if lines and lines[-1].count('"') % 2:
            lines[-1] += " " + line
        else:
            lines.append(line)
    return lines


def as_flags(words: list[str]) -> Flags:
    """Flags and their values, in the order of the words."""
    flags: Flags = {}
    current: list[str] | None = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, has_value, value = word[2:].partition("=")
            current = flags[name] = [value] if has_value else []
        elif word.startswith("-") and not NUMBER.match(word):
            current = None  # an option of the launcher
        elif current is not None:
            current.append(word)
    return flags


def variables_of(text: str) -> dict[str, str]:
    """Name -> value, of the lines that do nothing but set one."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        match = ASSIGNMENT.fullmatch(line)
        if match is None:
            continue
        try:
            words = shlex.split(match["value"], comments=True)
        except ValueError:
            continue
        if len(words) == 1:
            values[match["name"]] = filled(words[0], values)
    return values


def filled(text: str, values: Mapping[str, str]) -> str:
    """The text with the variables that are known, or have a default beside them.

    What only the shell knows stays: `$HOME`, `$(...)`.
    """

    def value_of(match: re.Match[str]) -> str:
        name = match["plain"] or match["braced"]
        if name in values:
            return values[name]
        return match["default"] or match[0]

    return REFERENCE.sub(value_of, text)
