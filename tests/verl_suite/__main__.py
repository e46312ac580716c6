"""Run verl's tests of the controller and its batch.

    python -m tests.verl_suite CHECKOUT [FILE ...]

CHECKOUT is a folder with verl's `tests/`: a clone, or an unpacked source distribution
(`pip download verl==0.8.0 --no-deps --no-binary verl`). Each file runs in a separate pytest. The
output lists the failed tests, and ends with a table of the passed ones.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

from tests import ROOT
from tests.verl_suite.names import write_alias

FILES = (
    "single_controller/test_auto_padding_on_cpu.py",
    "single_controller/test_colocated_workers.py",
    "single_controller/test_colocated_workers_fused.py",
    "single_controller/test_decorator_on_cpu.py",
    "single_controller/test_fused_workers_on_cpu.py",
    "single_controller/test_ray_local_envs_on_cpu.py",
    "test_protocol_on_cpu.py",
    "utils/test_seqlen_balancing.py",
)
LIMIT_S = 900


@dataclass
class Outcome:
    """The result of the tests of one file."""

    passed: int
    others: list[str]
    """Those that failed or were skipped, with the reason."""


def run_file(path: Path) -> Outcome:
    """Run one file, in a folder with a package `verl` that is ours."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_alias(folder)
        shutil.copy(path, folder)
        report = folder / "report.xml"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([name, str(ROOT)])}
        environment |= {"RAY_TMPDIR": name}  # no cluster of others is found there
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.verl_suite.stand_ins"]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}", "--rootdir", name, path.name]
        done = subprocess.run(
            command, cwd=folder, env=environment, timeout=LIMIT_S, capture_output=True, text=True
        )
        if not report.is_file():
            return Outcome(0, [f"{path.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}"])
        return read_report(report)


def read_report(report: Path) -> Outcome:
    """Read counts and reasons from pytest's report."""
    outcome = Outcome(0, [])
    for case in ET.parse(report).iter("testcase"):
        reasons = [child for child in case if child.tag in ("error", "failure", "skipped")]
        if not reasons:
            outcome.passed += 1
        for reason in reasons:
            first_line = reason.get("message", "").splitlines()[:1]
            outcome.others.append(f"{case.get('name')}: {reason.tag}: {''.join(first_line)}")
    return outcome


def main(checkout: str, *files: str) -> None:
    """Run the files, and print the results."""
    table = []
    for file in files or FILES:
        path = Path(checkout) / "tests" / file
        if not path.is_file():
            table.append((file, "not in this checkout"))
            continue
        outcome = run_file(path)
        for other in outcome.others:
            print(f"{file}: {other}")
        table.append((file, f"{outcome.passed} of {outcome.passed + len(outcome.others)}"))
    print(*(f"{file:55} {result}" for file, result in table), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
