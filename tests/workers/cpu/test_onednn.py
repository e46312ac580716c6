"""oneDNN's linear layers against torch's own; a row's bits do not depend on its neighbors."""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional

from tests.workers.cpu.test_allocator import heap_info
from tests.workers.distributed import run
from workers.cpu import onednn
from workers.cpu.onednn import (
    KERNELS_KEPT,
    limit_kernel_caches,
    linear,
    linear_binary,
    linear_silu,
    supports,
)

limit_kernel_caches()  # before `supports` builds the first kernel
SIZES = [(64, 128), (80, 48), (512, 64), (33, 70)]


@pytest.mark.parametrize(("width", "out"), SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers_match_torch(width: int, out: int, bias: bool) -> None:
    states, weight, other = torch.randn(37, width), torch.randn(out, width), torch.randn(37, out)
    bias = torch.randn(out) if bias else None
    plain = functional.linear(states, weight, bias)
    for result, expected in (
        (linear(states, weight, bias), plain),
        (linear(states, weight.t().contiguous().t(), bias), plain),
        (linear_silu(states, weight, bias), functional.silu(plain)),
        (linear_binary("add", other, states, weight, bias), other + plain),
        (linear_binary("mul", other, states, weight, bias), other * plain),
    ):
        torch.testing.assert_close(result, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not supports(torch.ones(2, 2)), reason="torch without oneDNN's operation")
@pytest.mark.parametrize(("width", "out"), SIZES)
def test_bits_of_a_row_do_not_depend_on_other_rows(width: int, out: int) -> None:
    states, weight, other = torch.randn(300, width), torch.randn(out, width), torch.randn(300, out)
    for compute in (
        lambda rows: linear(states[rows], weight),
        lambda rows: linear_silu(states[rows], weight),
        lambda rows: linear_binary("mul", other[rows], states[rows], weight),
        lambda rows: linear_binary("add", other[rows], states[rows], weight),
    ):
        whole = compute(slice(None))
        for first, count in ((0, 2), (3, 5), (10, 64), (298, 2), (7, 131)):
            rows = slice(first, first + count)
            assert torch.equal(compute(rows), whole[rows])


def test_other_dtypes_devices_and_torch_builds_use_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not supports(torch.ones(2, 2, dtype=torch.bfloat16))
    assert not supports(torch.ones(2, 2, device="meta"))
    onednn._works.cache_clear()
    try:
        monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *_: torch.zeros(4, 3))
        assert not supports(torch.ones(2, 2))
    finally:
        onednn._works.cache_clear()


def mebibytes_of_further_kernels() -> float:
    """Return the heap's growth from kernel `KERNELS_KEPT` to the last of 700 more."""
    limit_kernel_caches()
    states, weight = torch.ones(KERNELS_KEPT + 700, 32), torch.ones(32, 32)
    for rows in range(1, KERNELS_KEPT + 701):
        if rows == KERNELS_KEPT:
            before = heap_info().uordblks
        linear(states[:rows], weight)
    return (heap_info().uordblks - before) / 2**20


@pytest.mark.skipif(not supports(torch.ones(2, 2)), reason="torch without oneDNN's operation")
def test_the_kernel_cache_drops_unused_kernels() -> None:
    """The test measures the heap of a new process: torch's cache of 900 kernels takes 200 MiB."""
    (growth,) = run(1, mebibytes_of_further_kernels)
    assert growth < 40


def test_a_kernel_cache_limit_set_by_the_user_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in onednn.CACHE_LIMITS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    onednn.limit_kernel_caches()
    assert os.environ["LRU_CACHE_CAPACITY"] == "7"
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == str(onednn.KERNELS_KEPT)
