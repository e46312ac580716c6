"""oneDNN's products are torch's own, and a row's bits do not depend on its neighbours."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.nn.functional import linear, silu

from workers.cpu import onednn as products
from workers.cpu.onednn import is_product, product, product_silu, product_with

SIZES = [(64, 128), (80, 48), (512, 64), (33, 70)]


@pytest.mark.parametrize(("width", "out"), SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_products_are_those_of_torch(width: int, out: int, bias: bool) -> None:
    states, weight, other = torch.randn(37, width), torch.randn(out, width), torch.randn(37, out)
    bias = torch.randn(out) if bias else None
    plain = linear(states, weight, bias)
    for found, expected in (
        (product(states, weight, bias), plain),
        (product(states, weight.t().contiguous().t(), bias), plain),
        (product_silu(states, weight, bias), silu(plain)),
        (product_with("add", other, states, weight, bias), other + plain),
        (product_with("mul", other, states, weight, bias), other * plain),
    ):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not is_product(torch.ones(2, 2)), reason="torch without oneDNN's operation")
@pytest.mark.parametrize(("width", "out"), SIZES)
def test_the_bits_of_a_row_do_not_depend_on_the_others(width: int, out: int) -> None:
    states, weight, other = torch.randn(300, width), torch.randn(out, width), torch.randn(300, out)
    for compute in (
        lambda rows: product(states[rows], weight),
        lambda rows: product_silu(states[rows], weight),
        lambda rows: product_with("mul", other[rows], states[rows], weight),
        lambda rows: product_with("add", other[rows], states[rows], weight),
    ):
        whole = compute(slice(None))
        for first, count in ((0, 2), (3, 5), (10, 64), (298, 2), (7, 131)):
            rows = slice(first, first + count)
            assert torch.equal(compute(rows), whole[rows])


def test_other_types_devices_and_builds_of_torch_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not is_product(torch.ones(2, 2, dtype=torch.bfloat16))
    assert not is_product(torch.ones(2, 2, device="meta"))
    products._works.cache_clear()
    try:
        monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda *_: torch.zeros(4, 3))
        assert not is_product(torch.ones(2, 2))
    finally:
        products._works.cache_clear()


@pytest.mark.skipif(not is_product(torch.ones(2, 2)), reason="torch without oneDNN's operation")
def test_kernels_that_are_not_used_again_are_forgotten() -> None:
    """In a process of its own, as it looks at the whole heap:

    900 kernels take 200 MiB where torch keeps them.
    """
    code = """
import ctypes, torch
from workers.cpu.onednn import KERNELS_KEPT, product

class Heap(ctypes.Structure):  # glibc's mallinfo2
    _fields_ = [(name, ctypes.c_size_t) for name in "arena b c d mmapped f g used free keepcost".split()]

heap = ctypes.CDLL(None).mallinfo2
heap.restype = Heap
torch.set_num_threads(1)
states, weight = torch.ones(KERNELS_KEPT + 700, 32), torch.ones(32, 32)
for rows in range(1, KERNELS_KEPT + 701):
    if rows == KERNELS_KEPT:
        before = heap().used
    product(states[:rows], weight)
print((heap().used - before) / 2**20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 40
