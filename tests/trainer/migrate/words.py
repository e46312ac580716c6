"""Translations of one command, with the shell and without it."""

from __future__ import annotations

import shlex

from trainer.migrate.recorder import Command
from trainer.migrate.systems import SYSTEMS, migrate
from trainer.migrate.translation import Translation


def migrated(system: str, text: str) -> Translation:
    """Of a text that the shell reads, which runs one training."""
    (done,) = migrate(system, text)
    return done


def translated(system: str, line: str) -> Translation:
    """Of a line without anything that a shell would do, neither checked nor composed."""
    done = SYSTEMS[system].translate(Command(shlex.split(line)))
    assert done is not None
    return done


def translated_whole(system: str, line: str) -> Translation:
    """The same, checked and composed."""
    (done,) = migrate(system, shlex.split(line))
    return done
