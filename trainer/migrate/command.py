"""The words of a command: the program that it runs, and that program's flags.

launcher, program, words = find_program(["torchrun", "-m", "a.train", "--x", "1"], is_ours)
as_flags(words)                                  # {"x": ["1"]}; [] where a flag stands alone
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Flags = dict[str, list[str]]
"""Flag without its dashes -> its values."""
NUMBER = re.compile(r"-\.?\d")


def find_program(
    words: Sequence[str], is_one: Callable[[str], bool]
) -> tuple[list[str], str, list[str]] | None:
    """The words before it, its name as a module's, and those after it."""
    for place, word in enumerate(words):
        name = word.removesuffix(".py").removeprefix("./").replace("/", ".").lstrip(".")
        if not word.startswith("-") and is_one(name):
            return list(words[:place]), name, list(words[place + 1 :])
    return None


def program_or_flags(
    words: Sequence[str], is_one: Callable[[str], bool], unnamed: str = ""
) -> tuple[list[str], str, list[str]] | None:
    """As `find_program`; flags without any program are those of `unnamed`."""
    found = find_program(words, is_one)
    if found is None and words[0].startswith("--"):
        return [], unnamed, list(words)
    return found


def last_name(program: str) -> str:
    """`train` of `package.train`."""
    return program.rpartition(".")[2]


def num_processes(launcher: Sequence[str]) -> str:
    """Processes that `torchrun` or `accelerate launch` starts; "" where the words do not say."""
    for flag, values in as_flags(launcher).items():
        name = flag.replace("-", "_")
        if name in ("num_processes", "nproc_per_node", "num_gpus") and values:
            return values[0]
    return ""


def as_flags(words: Sequence[str]) -> Flags:
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
