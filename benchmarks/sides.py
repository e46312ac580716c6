"""The sides of a comparison: each computes in a process of its own, on one thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ENV = {
    **os.environ,
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
}


def ask(python: str, *arguments: str) -> Any:
    """What a Python process prints as JSON, last; one of ours imports this repository."""
    ours = {"PYTHONPATH": str(HERE.parent)} if python == sys.executable else {}
    done = subprocess.run(
        [python, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=3600,
        env=ENV | ours,
    )
    if done.returncode:
        sys.exit(f"{' '.join(arguments)[:200]} failed:\n{done.stderr[-3000:]}")
    # Ray may print after it.
    answers = [line for line in done.stdout.splitlines() if line[:1] in ("{", "[")]
    return json.loads(answers[-1] if answers else "null")
