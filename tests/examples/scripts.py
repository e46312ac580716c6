"""What tests of examples share: running a script, and reading the run folder that it leaves."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
