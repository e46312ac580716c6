"""Run a shell script with recorders in place of the programs that train; return their commands.

    recording = record("train.sh", ["8"])
    recording.commands[0].words          # ["python3", "-m", "verl.trainer.main_ppo", ...]

The shell takes care of variables, arrays, loops, files and other scripts (`recorder.py` runs it). A
variable that the script reads and nobody sets stays a variable, `$NAME`, so that you can paste the
translation where it is set. So do keys and tokens.
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

CONTINUATION = re.compile(r"\\[ \t]+(?:#[^\n]*)?(?:\n|\Z)")
"""A backslash before blanks or a comment at the end of a line, which bash does not continue."""
SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")
MARKED = re.compile("\2[$](\\w+)\3")
"""The value that the script sees of a variable that stays a variable; no other `$` looks like
it."""
MARKED_BY_BASH = re.compile(r"\$'\\002(\$\w+)\\003([^']*)'")
"""The same as bash prints it."""
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
    """Return what a script, or the text of one, runs in this folder with these arguments."""
    folder, raw = os.getcwd(), source_text(source)
    text, name = CONTINUATION.sub("\\\n", raw), "command.sh"
    if raw is not source:
        path = os.path.abspath(source)
        name = os.path.relpath(path, folder) if Path(path).is_relative_to(folder) else path
    words = ["-c", "--", text, name] if raw is source or text != raw else [name]

    kept, others = unset_variables(text, os.environ)
    environment = {**os.environ, **{variable: f"\2${variable}\3" for variable in kept}}
    process, pipe = start_child("trainer.migrate.recorder")
    try:
        pipe.send(Script([*words, *arguments], folder, environment))
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
    found = MARKED.findall("\n".join(word for each in answer.commands for word in each.words))
    return replace(
        answer,
        commands=[
            replace(each, words=[MARKED.sub(r"$\1", word) for word in each.words])
            for each in answer.commands
        ],
        printed=MARKED_BY_BASH.sub(r"\1\2", MARKED.sub(r"$\1", answer.printed)),
        variables=sorted(set(found)),
        unset=sorted({*others, *kept} - {*found, *os.environ}),
    )


def source_text(source: str) -> str:
    """Return the file's text; a source that names no file is the text itself."""
    if os.path.isfile(source):
        return Path(source).read_text(encoding="utf-8", errors="replace")
    if Path(source).suffix and not re.search(r"\s", source.strip()):
        raise ConfigError(f"there is no file {source}; give a script, or a command in quotes.")
    return source


def unset_variables(script: str, environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return variables that are never set: names that can stay `$NAME`, and names that cannot.

    If a script tests whether a variable is set, or computes with it, it gets no `$NAME` for it.
    Keys and tokens stay variables although they are set.
    """
    code = re.sub(r"(?m)^\s*#.*", "", script)
    references, others = list[str](), list[str]()
    for name in sorted({match[1] for match in REFERENCE.finditer(code)} - OF_BASH):
        is_set = rf"\b{name}\+?=|\b(for|local|declare|getopts \S+|read|mapfile)\b[^\n;]*\b{name}\b"
        has_default = rf"\$\{{{name}:?[-+=?]"
        is_tested = rf"-[nvz] +\W*{name}\b|\(\([^)\n]*\b{name}\b"
        if name in environment:
            references += [name] if SECRET.search(name) else []
        elif not re.search(f"{is_set}|{has_default}", code):
            (others if re.search(is_tested, code) else references).append(name)
    return references, others
