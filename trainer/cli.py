"""The console command `verl-like`. Starts fast: a subcommand's imports happen once it is chosen."""

from __future__ import annotations

import os
import sys

USAGE = """usage: verl-like ppo [key=value ...]

  ppo               train; `verl-like ppo --help` shows the main keys, `verl-like ppo --cfg job` every key
  -sc install=bash  print tab completion; use it with: eval "$(verl-like -sc install=bash)"
  --version         print the version
"""


def main() -> None:
    """Dispatch `sys.argv` to a subcommand."""
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if command in ("-h", "--help"):
        print(USAGE, end="")
    elif command == "--version":
        from importlib.metadata import version

        print(version("verl-like"))
    elif command in ("ppo", "-sc"):
        from trainer import main_ppo

        if command == "ppo":
            del sys.argv[1]
        else:  # a shell asks for completions; Hydra knows no subcommands
            os.environ["COMP_LINE"] = os.environ.get("COMP_LINE", "").replace(" ppo", "", 1)
        main_ppo.main()
    else:
        sys.exit(f"verl-like: no command {command!r}\n{USAGE}")
