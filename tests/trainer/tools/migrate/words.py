"""Translations of one command, with and without the shell.

What `migrate` prints for every returned command was run as a script of bash, which started the
program once, with exactly the command's words.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from typing import Any

from trainer.config.compose import load_config
from trainer.tools.migrate.recorder import Command
from trainer.tools.migrate.systems import RECIPES, SYSTEMS, migrate
from trainer.tools.migrate.translation import Translation


def migrated(system: str, text: str) -> Translation:
    """Translate a text that the shell reads and that runs one training."""
    (done,) = migrate(system, text)
    check_pasted(done)
    return done


def translated(system: str, line: str) -> Translation:
    """Translate a line without shell syntax, without checking or composing it."""
    done = SYSTEMS[system].translate(Command(shlex.split(line)))
    assert done is not None
    return done


def translated_whole(system: str, line: str) -> Translation:
    """Translate, check and compose a line."""
    (done,) = migrate(system, shlex.split(line))
    check_pasted(done)
    return done


def composed(done: Translation) -> Any:
    """Return the configuration of a translation; the value of each variable is its name."""
    return load_config(
        filled_in(done, {name: name for name in done.variables}), RECIPES[done.program]
    )


def filled_in(done: Translation, values: Mapping[str, str]) -> list[str]:
    """Return the settings of a translation with values for its variables."""
    settings = done.overrides()
    for name, value in values.items():
        settings = [re.sub(rf"\${name}\b", value, setting) for setting in settings]
    return settings


def notes(done: Translation) -> list[str]:
    """Return all that a translation says about flags."""
    lines = [*done.renamed, *done.always, *done.absent, *done.rejected, *done.joined]
    return [*lines, *done.incomplete]


def check_pasted(done: Translation) -> None:
    """Check that the command is valid bash whose words are the settings; each variable is 7."""
    values = dict.fromkeys(done.variables, "7")
    expected = [done.program, *filled_in(done, values)]
    words = zip(pasted(done, values), expected, strict=True)
    assert [pair for pair in words if pair[0] != pair[1] and "$((" not in pair[1]] == []


def pasted(done: Translation, environment: Mapping[str, str]) -> list[str]:
    """Return the words that `verl-like` gets from the script that `migrate` prints."""
    script = done.report()
    subprocess.run(["bash", "-n", "-c", script], check=True)
    recorder = "verl-like() { printf '%s\\0' \"$@\"; }"
    with tempfile.TemporaryDirectory() as folder:
        ran = subprocess.run(
            ["bash", "-c", f"{recorder}\n{script}"],
            env={**environment, "ROW_TOKENS": "100"},
            capture_output=True,
            check=True,
            cwd=folder,
        )
        assert (ran.stderr, os.listdir(folder)) == (b"", [])
    return ran.stdout.decode().split("\0")[:-1]
