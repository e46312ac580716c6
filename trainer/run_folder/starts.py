"""`starts.jsonl`: when, where, by which command and with which packages a run was started.

A resumed run adds a line.
"""

from __future__ import annotations

import platform
import shlex
import socket
import sys
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from verl_like.files import json_line
from verl_like.masking import mask_text

STARTS_FILE = "starts.jsonl"
PACKAGES = (
    "verl-like",
    "torch",
    "transformers",
    "ray",
    "vllm",
    "flash-attn",
    "tensordict",
    "numpy",
)


def note_start(folder: Path) -> None:
    line = {  # orig_argv: a command's main takes words out of argv
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": socket.gethostname(),
        "command": mask_text(shlex.join(sys.orig_argv)),
        "versions": {"python": platform.python_version(), **installed_versions()},
    }
    with (folder / STARTS_FILE).open("a", encoding="utf-8") as file:
        file.write(json_line(line))


@cache
def installed_versions() -> dict[str, str]:
    """Of those of `PACKAGES` that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
