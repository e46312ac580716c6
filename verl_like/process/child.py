"""Starting a Python program as a child process with a pipe to it.

    process, pipe = start_child("package.program", "argument")    # there: main(pipe, "argument")

The child takes over this process's import path before it imports the program, and has no current
directory on it.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[2])
"""The folder that our packages lie in."""


def start_child(
    program: str, *arguments: str, env: Mapping[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], Connection]:
    """The process and our end of the pipe; `env` is added to this process's environment."""
    ours, theirs = Pipe()
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([ROOT, inherited] if inherited else [ROOT])
    module = "verl_like.process.child"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, program, str(theirs.fileno()), *arguments],
        pass_fds=[theirs.fileno()],
        env={**os.environ, **(env or {}), "PYTHONPATH": path},
        process_group=0,  # Ctrl-C is for the driver, which ends its children
    )
    theirs.close()
    try:
        ours.send(sys.path)
    except OSError:  # it ended at once
        ours.close()
        process.kill()
        process.wait()
        raise
    return process, ours


def _run_program() -> None:
    """What runs in the child."""
    _, program, descriptor, *arguments = sys.argv
    pipe = Connection(int(descriptor))
    sys.path[:] = pipe.recv()
    importlib.import_module(program).main(pipe, *arguments)


if __name__ == "__main__":
    _run_program()
