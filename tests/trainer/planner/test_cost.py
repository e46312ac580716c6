"""Predicted seconds, next to arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainer.planner.cost import (
    ALL_REDUCE_S,
    BYTES_REACHED,
    CALL_S,
    DECODE_LAYER_S,
    DEVICES,
    FLOPS_REACHED,
    Gpus,
    ModelCost,
    StepRows,
    decode_seconds,
    device_of,
    pass_seconds,
    spread,
    sync_seconds,
)
from verl_like.errors import ConfigError
from workers.parallel.dims import ParallelDims

H100 = DEVICES["H100"]
MODEL = ModelCost(8e9, 7.5e9, 32, 4096, 32 * 4096, 2 * 32 * 1024)
ROWS = StepRows(1024, 1024, 500, [500] * 2)


def h100s(num_gpus: int) -> Gpus:
    return Gpus(H100, num_gpus, 8)


def test_an_update_takes_six_operations_per_weight_and_token() -> None:
    seconds = pass_seconds(MODEL, ROWS, ParallelDims(), 16384, h100s(1), trains=True)
    attention = 3 * 2 * 2 * 32 * 4096 * 1000**2 / 2
    operations = 1024 * (6 * 7.5e9 * 1000 + attention)
    optimizer = 28 * 8e9 / (3350e9 * BYTES_REACHED)
    expected = operations / (989e12 * FLOPS_REACHED) + optimizer + CALL_S
    assert seconds == pytest.approx(expected)


def test_recomputation_costs_one_more_forward_pass() -> None:
    dims = ParallelDims()
    forward = pass_seconds(MODEL, ROWS, dims, 16384, h100s(1)) - CALL_S
    recomputed = pass_seconds(MODEL, ROWS, dims, 16384, h100s(1), trains=True, recomputes=True)
    plain = pass_seconds(MODEL, ROWS, dims, 16384, h100s(1), trains=True)
    assert recomputed - plain == pytest.approx(forward)


def test_two_stages_per_rank_halve_the_wait_of_a_pipeline() -> None:
    dims, rows = ParallelDims(pp=4), StepRows(16, 16, 500, [500])
    seconds = [
        pass_seconds(MODEL, rows, dims, 1000, h100s(4), num_stages=num) - CALL_S for num in (1, 2)
    ]
    assert seconds[0] / seconds[1] == pytest.approx((16 + 3) / (16 + 1.5))


def test_small_passes_wait_for_weights_of_other_nodes() -> None:
    """They wait less if weights are sharded only within a node."""
    rows = StepRows(4096, 4096, 500, [500], mini_batches=16)
    over_all = pass_seconds(MODEL, rows, ParallelDims(shard=64), 1000, h100s(64), trains=True)
    dims = ParallelDims(replicate=8, shard=8)
    in_nodes = pass_seconds(MODEL, rows, dims, 1000, h100s(64), trains=True)
    one_pass = pass_seconds(MODEL, rows, ParallelDims(shard=64), 4000, h100s(64), trains=True)
    assert in_nodes < over_all
    assert one_pass < over_all
    moved = 16 * (4 * 2 + 2) * 2 * 8e9 * 63 / 64  # to four passes and back, and gradients
    assert over_all > moved / (8 * 50e9 * BYTES_REACHED)


def test_collectives_between_nodes_use_the_ports_of_all_ranks() -> None:
    gpus = h100s(64)
    assert gpus.rate(8) == 450e9 * BYTES_REACHED
    assert gpus.rate(64) == 8 * 50e9 * BYTES_REACHED
    assert gpus.rate(32, apart=2) == 4 * 50e9 * BYTES_REACHED
    assert gpus.rate(8, apart=8) == 50e9 * BYTES_REACHED


def test_weights_that_a_gpu_has_are_not_sent() -> None:
    assert sync_seconds(MODEL, h100s(1), is_shared=True) == CALL_S
    other_half = 8e9 / (450e9 * BYTES_REACHED)
    assert sync_seconds(MODEL, h100s(2), is_shared=True) == pytest.approx(CALL_S + other_half)
    travels = 2 * 8e9 / (50e9 * BYTES_REACHED)  # to a GPU of another node
    assert sync_seconds(MODEL, h100s(1), is_shared=False) == pytest.approx(CALL_S + travels)


def test_sharded_experts_are_not_gathered_and_get_tokens() -> None:
    """Two ways of every choice in every layer, in both passes; weights of four experts in eight."""
    model = ModelCost(30e9, 3e9, 48, 2048, 4096, 2 * 48 * 512, in_experts=28e9, choices=8)
    rows, bandwidth = StepRows(64, 64, 500, [500]), 450e9 * BYTES_REACHED
    gathered, spread_out = (
        pass_seconds(model, rows, ParallelDims(shard=8, ep=ep), 16384, h100s(8)) for ep in (1, 2)
    )
    assert gathered == pytest.approx(2 * 30e9 * 7 / 8 / bandwidth + CALL_S)  # hides the products
    computed = pass_seconds(model, rows, ParallelDims(replicate=8), 16384, h100s(8))
    sent = 2 * 8 * 2 * (64 / 8 * 1000) * 48 * 2048 / 2 / bandwidth
    started = 2 * 48 * ALL_REDUCE_S
    assert spread_out - sent - started == pytest.approx(
        max(computed, 2 * 16e9 * 7 / 8 / bandwidth + CALL_S)
    )


def test_decoding_reads_all_weights_per_token() -> None:
    rows = StepRows(1, 1, 100, [400])
    seconds = decode_seconds(MODEL, rows, h100s(1), 1, cache_bytes=20e9, most_at_once=256)
    assert seconds is not None
    least = 400 * 2 * 7.5e9 / (3350e9 * BYTES_REACHED)
    assert least < seconds < 1.5 * least + 400 * 32 * DECODE_LAYER_S + 2 * CALL_S


def test_an_engine_without_graphs_takes_the_measured_time_per_layer() -> None:
    small = ModelCost(0.5e9, 0.5e9, 24, 896, 24 * 896, 2 * 24 * 128)
    for samples, measured in ((64, 11.8e-3), (256, 13.2e-3)):
        rows = StepRows(samples, samples, 128, [256])
        seconds = decode_seconds(small, rows, h100s(1), 1, 20e9, 256, is_eager=True)
        assert seconds is not None
        assert seconds == pytest.approx(256 * measured + CALL_S, rel=0.2)


def test_more_tokens_read_more_experts() -> None:
    model = replace(MODEL, in_experts=6e9, active=MODEL.active - 6e9 * 7 / 8, expert_share=1 / 8)
    assert model.read_by(1) == model.active
    assert model.read_by(2) == pytest.approx(model.active + 6e9 * 7 / 64)
    assert model.read_by(256) == pytest.approx(MODEL.active)


def test_a_cache_too_small_for_a_row_is_no_layout() -> None:
    assert decode_seconds(MODEL, ROWS, h100s(1), 1, cache_bytes=1e6, most_at_once=256) is None


@pytest.mark.parametrize("mean", [100, 256, 400, 512])
def test_lengths_have_the_requested_mean(mean: float) -> None:
    rows = StepRows(64, 64, 128, spread(mean, 512))
    assert rows.mean_response == pytest.approx(mean, rel=0.01)
    assert rows.responses[-1] <= 512


def test_a_custom_gpu_needs_all_its_numbers() -> None:
    specs = {"memory_gib": 40, "flops": 2e14, "memory_bandwidth": 1e12, "link_bandwidth": 1e11}
    with pytest.raises(ConfigError, match=r"^mine .* set --network-bandwidth \("):
        device_of("mine", specs)
    assert device_of("mine", {**specs, "network_bandwidth": 1e10}).bytes == 40 * 2**30
    assert device_of("h100", {"memory_gib": 40.0}).memory_gib == 40
