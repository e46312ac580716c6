"""Linear layers on CPUs through oneDNN, whose kernels are written for the processor they find, of
whatever maker.

Torch hands float32 products to MKL, which has its fastest kernels for one maker's processors: on
others with 512-bit vectors oneDNN takes half the time. Its bits for a row do not depend on the
other rows, from two rows on. The weights are read where they are; nothing is packed or copied.
Every number of rows takes a kernel of its own, a third of a millisecond and a quarter MiB when it
is first seen. `direct_forward` decodes with it, `lean` trains with it.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor
from torch.nn import functional

KERNELS_KEPT = 256
"""Kernels that a process keeps.

Two caches hold them, oneDNN's own and torch's, and each would keep 1024.
"""
for _name in (
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "LRU_CACHE_CAPACITY",
):  # both are read when the first one is built
    os.environ.setdefault(_name, str(KERNELS_KEPT))


def is_product(weight: Tensor) -> bool:
    """Whether oneDNN multiplies by this weight: float32 on a CPU, in a torch that has the
    operation.
    """
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and _works()


def product(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear` for [rows, in] and [out, in]; see `is_product`."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    return found


def product_silu(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(linear(states)), in one pass."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "swish", [], "")
    return found


def product_with(
    kind: str, other: Tensor, states: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """other + linear(states) for kind "add", other * linear(states) for "mul", in one pass."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise.binary(states, other, weight, bias, kind)
    return found


@functools.cache
def _works() -> bool:
    """Whether torch's operations, which are not among its public ones, are here and say what they
    should.
    """
    states, weight, bias = (
        torch.linspace(-1, 1, 20).view(4, 5),
        torch.linspace(-1, 1, 15).view(3, 5),
        torch.ones(3),
    )
    other, plain = states[:, :3] - 0.5, functional.linear(states, weight, bias)
    try:
        pairs = (
            (product(states, weight, bias), plain),
            (product(states, weight.t().contiguous().t()), plain - bias),
            (product_silu(states, weight, bias), functional.silu(plain)),
            (product_with("add", other, states, weight, bias), other + plain),
            (product_with("mul", other, states, weight, bias), other * plain),
        )
    except (AttributeError, RuntimeError):
        return False
    return all(torch.allclose(found, expected, atol=1e-5) for found, expected in pairs)
