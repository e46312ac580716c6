"""The quickstart, run as a reader runs it: in a terminal, with its environment's Python."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.conftest import load
from tests.examples.scripts import EXAMPLES, bash
from tests.integration.runs import lines
from trainer.launch import NO_ERRORS


def interrupted_in_a_terminal(
    script: Path, columns: int, ready: Path, **environment: object
) -> tuple[int, str]:
    """Run the script in a terminal, press Ctrl-C once `ready` exists; return exit code and output.

    Check that no process of the script is left.
    """
    descendants = load("examples/quickstart/watch.py").descendants
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(ROOT)
        os.execvpe(
            "bash",
            ["bash", str(script)],
            {**os.environ, **{name: str(v) for name, v in environment.items()}},
        )
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    shown, seen, deadline = b"", set(), time.monotonic() + 300
    while time.monotonic() < deadline:
        if not seen and ready.exists():
            seen = set(descendants(pid))
            os.write(terminal, b"\x03")
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # the script has ended
                break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(terminal)
    assert [other for other in seen if Path(f"/proc/{other}").exists()] == []
    return code, shown.decode()


@pytest.fixture
def run_dir(tiny_dir: Path, tmp_path: Path) -> Path:
    """A run folder with a model, so that the script trains none."""
    (tmp_path / "tiny").symlink_to(tiny_dir)
    return tmp_path


@pytest.mark.long
def test_the_quickstart_can_be_checked_for_another_gpu(run_dir: Path, forked_python: Path) -> None:
    done = bash(
        EXAMPLES / "quickstart" / "run.sh",
        "trainer.simulate=1xH100",
        RUN_DIR=run_dir,
        PYTHON=forked_python,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert NO_ERRORS in done.stdout


@pytest.mark.long
def test_the_quickstart_runs_on_cpus_by_default(run_dir: Path, forked_python: Path) -> None:
    done = bash(
        EXAMPLES / "quickstart" / "run.sh", "--cfg", "job", RUN_DIR=run_dir, PYTHON=forked_python
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n  device: cpu " in done.stdout


@pytest.mark.long
@pytest.mark.ray
def test_the_quickstart_stops_resumes_learns_its_task_and_reports(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    committed = folder / "global_step_10" / "commit.json"
    code, shown = interrupted_in_a_terminal(
        EXAMPLES / "quickstart" / "run.sh", 40, committed, RUN_DIR=folder
    )
    assert code == 130, shown
    assert "Traceback" not in shown
    assert "Stopped by SIGINT after step" in shown
    bars = re.findall(r"\d+/60 \|[^\r\n]*", shown)
    assert bars
    assert max(map(len, bars)) <= 40 + len("^C")
    assert "Stopped by SIGINT after step" in (folder / "report.html").read_text()
    assert list(folder.glob("global_step_*/commit.json")), "the newest two stay"
    done = bash(EXAMPLES / "quickstart" / "run.sh", RUN_DIR=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumes from its last checkpoint" in done.stderr
    scores = [line["critic/score/mean"] for line in lines(folder)]
    assert scores[0] < 0.45
    assert scores[-1] >= 0.75
    assert re.search(r"peak memory of all \d+ processes together: \d\.\d\d GB", done.stdout)
    assert f"report: {folder}/report.html" in done.stdout
    assert "data-figure" in (folder / "report.html").read_text()
    again = bash(EXAMPLES / "quickstart" / "run.sh", RUN_DIR=folder)
    assert again.returncode == 0
    assert "has reached 0.75" in again.stderr
