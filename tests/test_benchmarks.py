"""Benchmarks import names that exist, and the quick ones run."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

import pytest

import workers.losses  # noqa: F401
from tests import ROOT
from tests.conftest import load
from tests.import_graph import PACKAGES, imports_of_file
from workers.training import lm_head

BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=[path.name for path in BENCHMARKS])
def test_a_benchmark_imports_names_that_exist(path: Path) -> None:
    for name, _ in imports_of_file(path):
        if name.partition(".")[0] in PACKAGES:
            resolve_name(name)


def test_both_sides_of_the_lm_head_benchmark_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_head, "CHUNK_BYTES", lm_head.CHUNK_BYTES)  # the benchmark changes it
    bench = load("benchmarks/bench_lm_head.py")
    vocabulary, *_ = bench.SIZES["small"]
    bench.make_model(tmp_path, vocabulary)
    chunks, whole = (bench.run_side(tmp_path, "small", in_chunks) for in_chunks in (True, False))
    for name in ("log_prob_sum", "entropy", "grad_norm"):
        assert chunks[name] == pytest.approx(whole[name], rel=1e-5)
    assert chunks["grad_norm"] > 0


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
