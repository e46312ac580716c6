"""Run a script of `examples/`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests import ROOT

EXAMPLES = ROOT / "examples"


def bash(script: Path, *arguments: str, **environment: object) -> subprocess.CompletedProcess[str]:
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    variables |= {key: str(value) for key, value in environment.items()}
    return subprocess.run(
        ["bash", str(script), *arguments],
        cwd=ROOT,
        env=variables,
        capture_output=True,
        text=True,
        timeout=540,
        check=False,
    )
