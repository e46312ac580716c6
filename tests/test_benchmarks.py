"""Benchmarks import names that exist, and the quick ones run."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

import pytest
import torch

import workers.losses  # noqa: F401
from tests import ROOT
from tests.conftest import load
from tests.forked import run_program
from tests.import_graph import PACKAGES, imports_of_file
from tests.workers.rollout_engines import make_engine, make_model
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from verl_like.calls.diagnose import CallTimes
from verl_like.calls.transport import Transport
from verl_like.process.store import SignedStore
from workers.losses.registry import POLICY_LOSSES
from workers.rewards.scorer import Scorer
from workers.training import lm_head
from workers.weights import checksum
from workers.weights.channel import HOST, Channel, Connection, fill_buckets

BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("path", BENCHMARKS, ids=[path.name for path in BENCHMARKS])
def test_a_benchmark_imports_names_that_exist(path: Path) -> None:
    for name, _ in imports_of_file(path):
        if name.partition(".")[0] in PACKAGES:
            resolve_name(name)


def measure_algorithms() -> None:
    """Run `bench_algorithms.py` in a separate process."""
    load("benchmarks/bench_algorithms.py").main()


def test_every_estimator_and_loss_is_measured(tmp_path: Path) -> None:
    done = run_program(measure_algorithms, "--small", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    measured = [line[:44].strip() for line in done.stdout.splitlines()]
    for name in ADVANTAGE_ESTIMATORS:
        assert f"estimator {name}" in measured
    for name in POLICY_LOSSES:
        assert f"loss {name}" in measured
    assert "value loss" in measured


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


def test_an_async_run_keeps_a_bounded_number_of_samples(tmp_path: Path) -> None:
    rows = load("benchmarks/bench_async_memory.py").measure(tmp_path, steps=3)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["driver_mib"] > 50 and row["generator_mib"] > 50 for row in rows)
    assert all(row["open_samples"] <= 4 * 8 and row["queued"] <= 2 * 16 for row in rows)


def test_the_safety_benchmark_switches_weight_hashes_off_and_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_hashes, take = [], checksum.xxhash.xxh3_64_intdigest
    begin = checksum.xxhash.xxh3_64
    monkeypatch.setattr(
        checksum.xxhash, "xxh3_64_intdigest", lambda content: num_hashes.append(1) or take(content)
    )
    monkeypatch.setattr(checksum.xxhash, "xxh3_64", lambda: num_hashes.append(1) or begin())
    model = make_model(tmp_path)
    engine = make_engine("native", model, tmp_path)
    state = dict(model.named_parameters())

    def sync() -> int:
        num_hashes.clear()
        unsigned = SignedStore(cast(Any, None), "", "")
        arriving = Channel(Connection("", 0, 2, None), unsigned, 1, HOST)
        (bucket,) = fill_buckets(state.items(), 2**24, arriving.room, arriving.watch)
        tensors = arriving._verified(0, bucket.payload, {"number": 0, "tensors": bucket.entries})
        engine.load_weights(tensors)
        engine.commit(1)
        for name, weight in engine.named_weights():
            assert torch.equal(weight, state[name])
        return len(num_hashes)

    on = sync()
    assert on == 2 * len(state), "the sender and the receiver hash each weight"
    undo = load("benchmarks/bench_safety.py").without_hashes()
    assert sync() == 0
    while undo:
        undo.pop()()
    assert sync() == on


@pytest.mark.parametrize("part", ["sandbox", "watch"])
def test_the_safety_benchmark_patches_and_restores_the_driver(part: str) -> None:
    owners = (Scorer, Transport, CallTimes)
    before = [dict(vars(owner)) for owner in owners]
    undo = getattr(load("benchmarks/bench_safety.py"), f"without_{part}")()
    assert [dict(vars(owner)) for owner in owners] != before
    for restore in undo:
        restore()
    assert [dict(vars(owner)) for owner in owners] == before
