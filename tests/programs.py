"""Programs that tests run in a separate process, and how their results come back."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests import ROOT

VERL_LIKE = Path(sys.executable).parent / "verl-like"
"""The command, as it is installed."""
RESULT = "RESULT "
"""Starts the line of a program's output that has its result."""


def tell(result: Mapping[str, Any]) -> None:
    """Print this program's result for `found_by` in the test's process."""
    print(RESULT + json.dumps(result), flush=True)


def found_by(python: Path | str, module: str, *arguments: Path, limit_s: float) -> dict[str, Any]:
    """Return the result of `python -m module arguments`."""
    done = subprocess.run(
        [python, "-m", module, *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False,
    )  # fmt: skip
    results = [line for line in done.stdout.splitlines() if line.startswith(RESULT)]
    assert results, done.stdout[-3000:] + done.stderr[-3000:]
    result: dict[str, Any] = json.loads(results[0].removeprefix(RESULT))
    return result
