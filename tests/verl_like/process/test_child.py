"""Starting a Python program as a child process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verl_like.process.child import ROOT, start_child


def main(pipe, *arguments):
    """Run in the child of the test below."""
    pipe.send((arguments, sys.path, os.environ["GIVEN"], __name__))
    pipe.recv()
    sys.exit(7)


def test_a_child_gets_arguments_import_path_and_environment(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(tmp_path))
    program = "tests.verl_like.process.test_child"
    process, pipe = start_child(program, "one", "two", env={"GIVEN": "yes"})
    assert pipe.poll(30)
    assert pipe.recv() == (("one", "two"), sys.path, "yes", program)
    pipe.send("end")
    assert process.wait(30) == 7


SESSION = """
print("the session begins", flush=True)
from verl_like.process.child import start_child

process, pipe = start_child("own_program")
print(pipe.recv())
process.wait()
"""


def test_children_do_not_run_a_script_without_a_main_guard(tmp_path: Path) -> None:
    (tmp_path / "session.py").write_text(SESSION)
    (tmp_path / "own_program.py").write_text("def main(pipe):\n    pipe.send('here')\n")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "session.py")],
        env={**os.environ, "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "the session begins\nhere\n"


@pytest.mark.linux
def test_a_child_that_ends_before_it_connects_is_reaped(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen] = []

    class Noted(subprocess.Popen):
        """A process that has ended when its parent continues."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            started.append(self)
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(BrokenPipeError):
        start_child("nothing")
    assert started[0].returncode is not None
