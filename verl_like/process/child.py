"""Start a Python program as a child process with a pipe to it.

    process, pipe = start_child("package.program", "argument")    # there: main(pipe, "argument")

The child starts without the current directory on its import path, and copies this process's import
path before it imports the program.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from verl_like.terminal import survive_broken_pipes

ROOT = str(Path(__file__).resolve().parents[2])
"""The folder of our packages."""


def start_child(
    program: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    inherited: Mapping[str, str] | None = None,
) -> tuple[subprocess.Popen[bytes], Connection]:
    """Start the program, and return its process and our end of the pipe.

    The child's environment is `env` added to `inherited`, by default this process's environment.
    """
    ours, theirs = Pipe()
    own_path = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([ROOT, own_path] if own_path else [ROOT])
    inherited_or_all = os.environ if inherited is None else inherited
    environment = {**inherited_or_all, **(env or {}), "PYTHONPATH": path}
    process = _start_python(program, theirs, arguments, environment)
    theirs.close()
    try:
        ours.send([os.path.abspath(folder) for folder in sys.path])
    except OSError:  # the child ended at once
        ours.close()
        process.kill()
        process.wait()
        raise
    return process, ours


def _start_python(
    program: str, pipe: Connection, arguments: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start an interpreter that runs `_run_program`, in its own process group."""
    module = "verl_like.process.child"
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, program, str(pipe.fileno()), *arguments],
        pass_fds=[pipe.fileno()],
        env=environment,
        process_group=0,  # Ctrl-C reaches only the driver, which ends its children
    )


def _run_program() -> None:
    """Run the program in the child."""
    survive_broken_pipes()
    _, program, descriptor, *arguments = sys.argv
    pipe = Connection(int(descriptor))
    sys.path[:] = pipe.recv()
    importlib.import_module(program).main(pipe, *arguments)


if __name__ == "__main__":
    _run_program()
