"""A shell script, run with recorders in the place of what trains: the commands that it gives.

    recording = record("train.sh", ["8"])
    recording.commands[0].words          # ["python3", "-m", "verl.trainer.main_ppo", ...]

Variables, arrays, loops, files and other scripts are the shell's business (`recorder.py` runs it).
A variable that the script reads and nobody sets stays one, `$NAME`, so that the translation can be
pasted where it is set; so do keys and tokens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from trainer.migrate.recorder import Recording, Script
from verl_like.errors import ConfigError
from verl_like.process.child import start_child

CONTINUATION = re.compile(r"\\[ \t]*(?:#[^\n]*)?(?:\n|\Z)")
"""A backslash at the end of a line, or before a comment, as papers print commands."""
LINE_NUMBER = re.compile(r"^[ \t]*(\d+)[ \t]+(?=--)", re.M)
SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")
KEPT = re.compile("\2[$](\\w+)\3")
"""What the script reads of a variable that stays one: no other `$` looks so."""
QUOTED = re.compile(r"\$'\\002(\$\w+)\\003([^']*)'")
"""The same, as bash prints it."""
REFERENCE = re.compile(r"\$\{?([A-Za-z_]\w*)")
OF_BASH = frozenset(
    """
    BASH BASHPID BASH_REMATCH BASH_SOURCE BASH_VERSION COLUMNS DIRSTACK EPOCHREALTIME EPOCHSECONDS
    EUID FUNCNAME GROUPS HOSTNAME HOSTTYPE IFS LINENO LINES MACHTYPE OLDPWD OPTARG OPTIND OSTYPE
    PIPESTATUS PPID PWD RANDOM REPLY SECONDS SHELLOPTS SHLVL UID
    """.split()
)
"""Variables that bash sets."""


def record(source: str, arguments: Sequence[str] = ()) -> Recording:
    """What a script, or the text of one, runs in this folder with these arguments."""
    folder = os.getcwd()
    text = source_text(source)
    script = _as_script(text)
    name = "verl_like_command.sh"
    if text is not source:
        path = os.path.abspath(source)
        is_here = Path(path).is_relative_to(folder)
        if is_here or script == text:  # from outside it runs where it is, which holds its own text
            name = os.path.relpath(path, folder) if is_here else path

    kept, others = unset_variables(script, os.environ)
    environment = {**os.environ, **{variable: f"\2${variable}\3" for variable in kept}}
    process, pipe = start_child("trainer.migrate.recorder")
    try:
        pipe.send(Script(script, name, list(arguments), folder, environment))
        answer = pipe.recv()
    except (EOFError, OSError) as err:
        raise ConfigError("the process that runs the script has ended without an answer.") from err
    finally:
        pipe.close()
        process.wait()
    if isinstance(answer, str):
        raise ConfigError(
            f"the script was not run, since there is no sandbox for it here: {answer} Without one "
            "give the command that the script runs, and your own shell fills it in: "
            "verl-like migrate SYSTEM python3 -m ..."
        )
    assert isinstance(answer, Recording), answer
    found = KEPT.findall("\n".join(word for each in answer.commands for word in each.words))
    commands = [
        replace(each, words=[KEPT.sub(r"$\1", word) for word in each.words])
        for each in answer.commands
    ]
    unset = sorted({*others, *kept} - {*found, *os.environ})
    printed = QUOTED.sub(r"\1\2", KEPT.sub(r"$\1", answer.printed))
    variables = sorted(set(found))
    return Recording(commands, answer.ending, printed, variables, unset)


def source_text(source: str) -> str:
    """The file's text; what names no file is the text itself."""
    if os.path.isfile(source):
        return Path(source).read_text(encoding="utf-8", errors="replace")
    if Path(source).suffix and not re.search(r"\s", source.strip()):
        raise ConfigError(f"there is no file {source}; give a script, or a command in quotes.")
    return source


def unset_variables(script: str, environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Variables that nobody sets: those that can be read as `$NAME`, and those that cannot.

    A script that asks whether a variable is set, or computes with it, gets none in its place. Keys
    and tokens are read as variables though they are set.
    """
    code = re.sub(r"(?m)^\s*#.*", "", script)
    kept: list[str] = []
    others: list[str] = []
    for name in sorted({match[1] for match in REFERENCE.finditer(code)} - OF_BASH):
        is_set = rf"\b{name}\+?=|\b(for|local|declare|getopts \S+|read|mapfile)\b[^\n;]*\b{name}\b"
        has_default = rf"\$\{{{name}:?[-+=?]"
        is_asked = rf"-[nvz] +\W*{name}\b|\(\([^)\n]*\b{name}\b"
        if name in environment:
            kept += [name] if SECRET.search(name) else []
        elif not re.search(f"{is_set}|{has_default}", code):
            (others if re.search(is_asked, code) else kept).append(name)
    return kept, others


def _as_script(text: str) -> str:
    """A printed listing as a script: without line numbers, and comments behind backslashes."""
    numbers = [int(number) for number in LINE_NUMBER.findall(text)]
    if len(numbers) > 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        text = LINE_NUMBER.sub("", text)
    return CONTINUATION.sub("\\\n", text)
