"""Find the modules that an import loads, in forks of one interpreter that has loaded nothing.

python -P -m tests.loaded_modules MODULES --torch MODULES    # the later ones find torch loaded
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from tests import ROOT

AFTER_TORCH = "--torch"


def loaded_by(modules: Sequence[str], after_torch: Sequence[str]) -> dict[str, list[str]]:
    """Return module -> the modules that its import loads, without or after torch."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", __name__, *modules, AFTER_TORCH, *after_torch],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(map(json.loads, done.stdout.splitlines()))


def print_in_fork(module: str) -> None:
    if os.fork() == 0:
        importlib.import_module(module)
        print(json.dumps([module, sorted(sys.modules)]), flush=True)
        os._exit(0)
    _, status = os.wait()
    if status:
        sys.exit(1)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        if name == AFTER_TORCH:
            importlib.import_module("torch")
        else:
            print_in_fork(name)
