"""`benchmarks/gpu.sh` on the CPU: its parts, and each of them on a machine without Ray and vLLM."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.conftest import load
from tests.forked import run_program

INTERPRETER = f"""#!/usr/bin/env bash
[ "$1" != -c ] || exec "{sys.executable}" "$@"
echo "$@" >> "$COMMANDS"
[ "$2" != "$FAILING" ]
"""
"""Answers what the script asks of its interpreter, and notes what it would have it run."""
LAST_WORDS = {
    "update": r"^update: \d+ tokens .* TFLOP/s of 790 ",
    "decode": r"^decode: 64 x 8 tokens .* GB/s of 4300 ",
    "step": r"^step: two GRPO steps .* Ray and vLLM: \[\]$",
}
"""Part -> what it says at its end."""


def run_script(folder: Path, failing: str = "") -> subprocess.CompletedProcess[str]:
    """The script small on the CPU, with the commands of its parts noted instead of run."""
    interpreter = folder / "python"
    interpreter.write_text(INTERPRETER, encoding="utf-8")
    interpreter.chmod(0o755)
    own = {"PYTHON": str(interpreter), "COMMANDS": str(folder / "commands"), "FAILING": failing}
    return subprocess.run(
        ["bash", str(ROOT / "benchmarks/gpu.sh"), "--device", "cpu", "--tiny"],
        env=os.environ | own,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_trial_on_the_cpu_runs_every_part_and_says_that_no_gpu_was_used(tmp_path: Path) -> None:
    done = run_script(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^-- (\w+): ok", done.stdout, re.M) == list(LAST_WORDS)
    assert "gpu tests\n-- not run: they need a CUDA device" in done.stdout
    assert "no GPU was used" in done.stdout
    commands = (tmp_path / "commands").read_text(encoding="utf-8").splitlines()
    assert commands == [f"benchmarks/gpu_side.py {' '.join(of_part(part))}" for part in LAST_WORDS]


def test_a_part_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    done = run_script(tmp_path, failing="decode")
    assert done.returncode == 1
    assert re.findall(r"^-- (\w+): ok", done.stdout, re.M) == ["update", "step"]
    assert done.stdout.endswith("FAILED: decode\n")


def of_part(part: str) -> list[str]:
    """The arguments of a part's command."""
    return [part, "--device", "cpu", "--tiny"]


@pytest.mark.parametrize("part", LAST_WORDS)
def test_a_part_runs_small_on_a_cpu_without_ray_and_vllm(part: str, tmp_path: Path) -> None:
    done = run_program(main_without_ray_and_vllm, *of_part(part), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(LAST_WORDS[part], done.stdout, re.M)


def main_without_ray_and_vllm() -> None:
    """`gpu_side.py` in a process of its own."""
    sys.meta_path.insert(0, Absent())
    load("benchmarks/gpu_side.py").main()


class Absent:
    """Finds Ray and vLLM to be absent."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ("ray", "vllm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
