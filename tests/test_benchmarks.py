"""Benchmarks are run by hand; what they import of the packages is there."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = sorted((Path(__file__).resolve().parent.parent / "benchmarks").glob("*.py"))
PACKAGES = ("verl_like", "workers", "trainer")


def imported(path: Path) -> list[tuple[str, str]]:
    """(module, name) for every name that a file imports of the packages, at its top or later."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in PACKAGES:
            found += [(str(node.module), alias.name) for alias in node.names]
    return found


@pytest.mark.parametrize("path", BENCHMARKS, ids=[path.name for path in BENCHMARKS])
def test_a_benchmark_imports_names_that_exist(path: Path) -> None:
    for module, name in imported(path):
        if not hasattr(importlib.import_module(module), name):
            importlib.import_module(f"{module}.{name}")


@pytest.mark.slow
def test_the_benchmark_of_the_head_finds_like_numbers_in_less_memory() -> None:
    script = next(path for path in BENCHMARKS if path.name == "bench_lm_head.py")
    done = subprocess.run(
        [sys.executable, str(script), "--small"], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["log_prob_sum, apart"] < 1e-6
    assert found["grad_norm, apart"] < 1e-5
    assert found["chunks, score_peak_mib"] < found["whole, score_peak_mib"]
