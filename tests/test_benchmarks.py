"""Benchmarks import names that exist, and the quick ones run."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

import pytest

from tests import ROOT
from tests.conftest import load
from tests.import_graph import PACKAGES, imports_of_file

BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=[path.name for path in BENCHMARKS])
def test_a_benchmark_imports_names_that_exist(path: Path) -> None:
    for name, _ in imports_of_file(path):
        if name.partition(".")[0] in PACKAGES:
            resolve_name(name)


@pytest.mark.slow
def test_an_int8_reference_loads_in_60_percent_of_the_float32_memory() -> None:
    compare = load("benchmarks/bench_quantization.py").compare
    report = compare(hidden=256, layers=24, num_rows=2)
    if report["load peak of int8 / float32 model"] > 0.6:
        # the peak covers the whole process, whose allocator sometimes keeps a few more pages
        report = compare(hidden=256, layers=24, num_rows=2)
    assert report["float32, load_peak_mib"] > 0.95 * report["model_mib"]
    assert report["load peak of int8 / float32 model"] <= 0.6
    assert report["linear weights, int8 / float32"] <= 0.4
    assert 0 < report["|log-prob apart|, mean"] < 0.2
