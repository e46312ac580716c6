"""Forked processes have the preloaded modules, and behave like started ones."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path

import pytest

from tests import bare_forks
from tests.conftest import PRELOADED
from tests.fork_client import packed
from tests.forked import run_program


def loaded() -> list[str]:
    return [name for name in PRELOADED if name in sys.modules]


def print_loaded() -> None:
    """Run in the process of the test below."""
    print(*loaded())
    sys.exit(f"in {Path.cwd()} with {sys.argv[1:]}")


def test_a_forked_program_has_the_modules_and_its_own_output_and_status(
    tmp_path: Path,
) -> None:
    done = run_program(print_loaded, "one", folder=tmp_path)
    assert done.stdout.split() == PRELOADED
    assert (done.returncode, done.stderr) == (1, f"in {tmp_path} with ['one']\n")


@pytest.mark.example
@pytest.mark.parametrize("arguments", [["-c", "{}"], ["program.py"], ["-P", "-m", "program"]])
def test_a_forked_python_runs_code_files_and_modules(
    forked_python: Path, tmp_path: Path, arguments: list[str]
) -> None:
    code = "import sys; print(__name__, sys.argv[1:], *sys.modules); sys.exit('words')"
    (tmp_path / "program.py").write_text(code)
    command = [argument.format(code) for argument in arguments]
    done = subprocess.run(
        [forked_python, *command, "one"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("__main__ ['one'] ")
    assert {*PRELOADED} <= {*done.stdout.split()}
    assert (done.returncode, done.stderr) == (1, "words\n")


@pytest.mark.example
def test_a_signal_to_a_forked_python_ends_the_fork(forked_python: Path) -> None:
    code = "import signal, sys, time; print('up', flush=True); time.sleep(60)"
    with subprocess.Popen([forked_python, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM


def test_killing_a_fork_that_ended_unreported_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bare_forks, "servers", {"some": "server"})
    ended = subprocess.Popen(["true"])
    ended.wait()
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(packed(ended.pid))
        process = bare_forks.BareProcess(ours)
        process.kill()
        theirs.sendall(packed(-signal.SIGKILL))
        assert process.wait() == -signal.SIGKILL


def test_a_killed_server_of_bare_forks_is_replaced() -> None:
    def start() -> int:
        ours, theirs = Pipe()
        with ours, theirs:
            environment = dict(os.environ)
            forked = bare_forks.start_fork("workers.rewards.program", theirs, [], environment)
        return forked.wait(10)  # nobody is at the other end of its pipe

    first = start()
    lost = bare_forks.server("workers.rewards.program")
    os.kill(lost._process.pid, signal.SIGKILL)
    lost._process.wait()
    assert start() == first
    assert bare_forks.server("workers.rewards.program") is not lost


@pytest.mark.ray
def test_a_worker_of_the_shared_ray_cluster_has_the_modules(ray_session: None) -> None:
    import ray

    assert ray.get(ray.remote(num_cpus=0)(loaded).remote()) == PRELOADED
