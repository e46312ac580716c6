"""Predicted seconds, next to arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainer.tools.planner.cost import (
    ALL_REDUCE_S,
    CALL_S,
    DECODE_LAYER_S,
    DEVICES,
    LINKS_REACHED,
    PREPARE_S,
    Gpus,
    ModelCost,
    StepRows,
    assumed_lengths,
    decode_seconds,
    device_of,
    pass_seconds,
    sync_seconds,
)
from trainer.tools.planner.records import CallWork, Records, products_only
from verl_like.errors import ConfigError
from workers.parallel.sharding import ParallelDims

H100 = DEVICES["H100"]
WEIGHTS, LAYERS = 8e9, 32


def passes(num_ranks: int = 8, per_row: float = 0.01) -> Records:
    """Return works of a row of 1,000 tokens in every layer, and of weights that are in layers."""
    return products_only(
        WEIGHTS, per_row * H100.rates.products / 2, 1, LAYERS, H100.rates, num_ranks
    )


MODEL = ModelCost(
    WEIGHTS, 7.5e9, LAYERS, 4096, 32 * 4096, 2 * 32 * 1024, passes(), length=1000, num_ranks=8
)
ROWS = StepRows(1024, 1024, 500, [500] * 2)
ON_HOST = PREPARE_S * 1000
"""Seconds in which the host prepares a row."""


def h100s(num_gpus: int) -> Gpus:
    return Gpus(H100, num_gpus, 8)


def test_an_update_takes_its_passes_and_its_optimizer_steps() -> None:
    rows = replace(ROWS, mini_batches=4, epochs=2)
    seconds = pass_seconds(MODEL, rows, ParallelDims(), 16384, h100s(1), trains=True)
    step = 28 * WEIGHTS / H100.rates.memory
    expected = 2 * 1024 * (3 * 0.01 + ON_HOST) + 8 * step + CALL_S
    assert seconds == pytest.approx(expected)


def test_recomputed_layers_cost_their_forward_pass() -> None:
    dims = ParallelDims()
    forward = pass_seconds(MODEL, ROWS, dims, 16384, h100s(1)) - CALL_S - 1024 * ON_HOST
    plain, half, whole = (
        pass_seconds(MODEL, ROWS, dims, 16384, h100s(1), trains=True, recomputed=layers)
        for layers in (0, LAYERS // 2, LAYERS)
    )
    assert whole - plain == pytest.approx(forward)
    assert half - plain == pytest.approx(forward / 2)


def test_a_pass_takes_at_least_as_long_as_the_host_starts_it() -> None:
    works = Records({"forward": {LAYERS: {0: CallWork(0, 0.5), 1: CallWork(0.01, 0.5)}}})
    model = replace(MODEL, passes=works)
    seconds = pass_seconds(model, ROWS, ParallelDims(), 16000, h100s(1))
    assert seconds == pytest.approx(64 * 0.5 + 1024 * ON_HOST + CALL_S)


def test_two_stages_per_rank_halve_the_wait_of_a_pipeline() -> None:
    dims, rows = ParallelDims(pp=4), StepRows(16, 16, 500, [500])
    seconds = [
        pass_seconds(MODEL, rows, dims, 1000, h100s(4), num_stages=num) - CALL_S - 16 * ON_HOST
        for num in (1, 2)
    ]
    assert seconds[0] / seconds[1] == pytest.approx((16 + 3) / (16 + 1.5))


def test_small_passes_wait_for_weights_and_gradients_of_other_nodes() -> None:
    """They wait less if weights are sharded only within a node."""
    rows = StepRows(4096, 4096, 500, [500], mini_batches=16)
    over_all = pass_seconds(MODEL, rows, ParallelDims(shard=64), 1000, h100s(64), trains=True)
    dims = ParallelDims(replicate=8, shard=8)
    in_nodes = pass_seconds(MODEL, rows, dims, 1000, h100s(64), trains=True)
    one_pass = pass_seconds(MODEL, rows, ParallelDims(shard=64), 4000, h100s(64), trains=True)
    assert in_nodes < over_all
    assert one_pass < over_all
    moved = 16 * 4 * (2 * 2 + 4) * WEIGHTS * 63 / 64  # four passes per mini-batch
    step = 16 * 28 * WEIGHTS / 64 / H100.rates.memory
    rate = 8 * 50e9 * LINKS_REACHED
    assert over_all == pytest.approx(moved / rate + step + 64 * ON_HOST + CALL_S)


def test_collectives_between_nodes_use_the_ports_of_all_ranks() -> None:
    gpus = h100s(64)
    assert gpus.rate(8) == 450e9 * LINKS_REACHED
    assert gpus.rate(64) == 8 * 50e9 * LINKS_REACHED
    assert gpus.rate(32, apart=2) == 4 * 50e9 * LINKS_REACHED
    assert gpus.rate(8, apart=8) == 50e9 * LINKS_REACHED


def test_weights_that_a_gpu_has_are_not_sent() -> None:
    assert sync_seconds(MODEL, h100s(1), is_shared=True) == CALL_S
    other_half = 8e9 / (450e9 * LINKS_REACHED)
    assert sync_seconds(MODEL, h100s(2), is_shared=True) == pytest.approx(CALL_S + other_half)
    travels = 2 * 8e9 / (50e9 * LINKS_REACHED)  # to a GPU of another node
    assert sync_seconds(MODEL, h100s(1), is_shared=False) == pytest.approx(CALL_S + travels)


def test_sharded_experts_are_not_gathered_and_get_tokens() -> None:
    """Two ways of every choice in every layer, in both passes; weights of four experts in eight."""
    model = replace(MODEL, hidden_size=2048, in_experts=7e9, choices=8, passes=passes(8, 1e-6))
    rows, bandwidth = StepRows(64, 64, 500, [500]), 450e9 * LINKS_REACHED
    gathered, spread_out = (
        pass_seconds(model, rows, ParallelDims(shard=8, ep=ep), 16384, h100s(8)) for ep in (1, 2)
    )
    fixed = 8 * ON_HOST + CALL_S
    assert gathered == pytest.approx(2 * 8e9 * 7 / 8 / bandwidth + fixed)  # hides the products
    sent = 2 * 8 * 2 * (64 / 8 * 1000) * LAYERS * 2048 / 2 / bandwidth
    started = 2 * LAYERS * ALL_REDUCE_S
    assert spread_out - sent - started == pytest.approx(2 * 4.5e9 * 7 / 8 / bandwidth + fixed)


def test_vllm_reads_all_weights_per_token() -> None:
    rows = StepRows(1, 1, 100, [400])
    seconds = decode_seconds(MODEL, rows, h100s(1), 1, cache_bytes=20e9, most_at_once=256)
    assert seconds is not None
    least = 400 * 2 * 7.5e9 / H100.rates.memory
    assert least < seconds < 1.5 * least + 400 * LAYERS * DECODE_LAYER_S + 2 * CALL_S
    sampled = decode_seconds(MODEL, rows, h100s(1), 1, 20e9, 256, sampler=0.001)
    assert sampled == pytest.approx(seconds + 400 * 0.001)


def test_the_native_engine_takes_the_recorded_time_per_token() -> None:
    tokens = Records({"token": {LAYERS: {0: CallWork(0.01, 0.02), 100: CallWork(0.03, 0.02)}}})
    for samples, per_token in ((25, 0.02), (100, 0.03)):
        rows = StepRows(samples, samples, 128, [256])
        seconds = decode_seconds(MODEL, rows, h100s(1), 1, 20e9, 256, 0.0, tokens)
        read = samples * 0.01 * 128 / 1000
        assert seconds == pytest.approx(256 * per_token + read + CALL_S)


def test_more_tokens_read_more_experts() -> None:
    model = replace(MODEL, in_experts=6e9, active=MODEL.active - 6e9 * 7 / 8, expert_share=1 / 8)
    assert model.read_by(1) == model.active
    assert model.read_by(2) == pytest.approx(model.active + 6e9 * 7 / 64)
    assert model.read_by(256) == pytest.approx(MODEL.active)


def test_a_cache_too_small_for_a_row_is_no_layout() -> None:
    assert decode_seconds(MODEL, ROWS, h100s(1), 1, cache_bytes=1e6, most_at_once=256) is None


@pytest.mark.parametrize("mean", [100, 256, 400, 512])
def test_lengths_have_the_requested_mean(mean: float) -> None:
    rows = StepRows(64, 64, 128, assumed_lengths(mean, 512))
    assert rows.mean_response == pytest.approx(mean, rel=0.01)
    assert rows.responses[-1] <= 512


def test_a_custom_gpu_needs_all_its_numbers() -> None:
    specs = {"memory_gib": 40, "flops": 2e14, "memory_bandwidth": 1e12, "link_bandwidth": 1e11}
    with pytest.raises(ConfigError, match=r"^mine .* set --network-bandwidth \("):
        device_of("mine", specs)
    assert device_of("mine", {**specs, "network_bandwidth": 1e10}).bytes == 40 * 2**30
    assert device_of("h100", {"memory_gib": 40.0}).memory_gib == 40
