"""Benchmarks are run by hand; what they import of the packages is there."""

from __future__ import annotations

import ast
import importlib.util
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


def test_the_gain_of_bfloat16_is_judged_by_what_the_processor_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location(
        "bench_precision", BENCHMARKS[0].parent / "bench_precision.py"
    )
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)

    monkeypatch.setattr(bench, "CPU_INFO", tmp_path / "cpuinfo")
    assert bench.bfloat16_products() == []
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t: sse2 avx512_bf16 avx512_bf16x\n")
    assert bench.bfloat16_products() == ["avx512_bf16"]
    assert "has no bfloat16 products" in bench.verdict(0.4, [])
    assert bench.verdict(1.79, ["amx_bf16"]).endswith("with amx_bf16: the goal of 1.5 is reached")
    assert bench.verdict(1.2, ["amx_bf16"]).endswith("is not reached")
