"""`verl-like migrate SYSTEM COMMAND-OR-FILE`: a foreign command line in our settings."""

from __future__ import annotations

import logging
from pathlib import Path

from trainer.migrate.systems import migrate
from verl_like.errors import ConfigError
from verl_like.terminal import terminal_width


def main(system: str, source: str) -> None:
    """Print the translation."""
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    print(migrate(system, text_of(source)).report(terminal_width()), flush=True)


def text_of(source: str) -> str:
    """The file's text; what names no file is the command itself."""
    if "\n" in source or " " in source.strip() or not Path(source).suffix:
        return source
    path = Path(source)
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; give a script, or a command in quotes.")
    return path.read_text(encoding="utf-8", errors="replace")
