"""Linear layers on CPUs through oneDNN, whose kernels are written for the processor they find.

Torch hands float32 matrix products to MKL, which has its fastest kernels for one maker's
processors: on others with 512-bit vectors oneDNN takes half the time. Its bits for a row do not
depend on the other rows, from two rows on. The weights are read where they are; nothing is packed
or copied.

Every number of rows takes a kernel of its own, a third of a millisecond and a quarter MiB when it
is first seen. `limit_kernel_caches` bounds how many a process keeps.
"""

from __future__ import annotations

import functools
import os
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

KERNELS_KEPT = 256
"""Kernels that a process keeps, in each of the two caches that hold them."""
CACHE_LIMITS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables that bound the caches: oneDNN's own, and torch's."""


def limit_kernel_caches() -> None:
    """Bound the kernels that this process keeps; a limit that the user set is left alone.

    Each cache would keep 1024 kernels otherwise. Both read their limit when the first kernel is
    built, so an engine calls this while it is being built, before it computes anything.
    """
    for name in CACHE_LIMITS:
        os.environ.setdefault(name, str(KERNELS_KEPT))


def supports(weight: Tensor) -> bool:
    """Whether oneDNN multiplies by this weight: plain float32, on a CPU, in a torch that can."""
    is_plain = type(weight) in (Tensor, nn.Parameter)  # an int8 weight says it is float32, too
    return is_plain and weight.device.type == "cpu" and weight.dtype == torch.float32 and _works()


def linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`functional.linear` for [rows, in] and [out, in]; see `supports`."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    return result


def linear_silu(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """silu(linear(states)), in one pass."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "swish", [], "")
    return result


def linear_binary(
    kind: Literal["add", "mul"],
    other: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """other + linear(states) for kind "add", other * linear(states) for "mul", in one pass."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(states, other, weight, bias, kind)
    return result


@functools.cache
def _works() -> bool:
    """Whether torch has these operations, and they compute what they should.

    They are not among torch's public ones, so a build may lack them or change them.
    """
    states, weight = torch.linspace(-1, 1, 20).view(4, 5), torch.linspace(-1, 1, 15).view(3, 5)
    bias, other = torch.ones(3), states[:, :3] - 0.5
    plain = functional.linear(states, weight, bias)
    try:
        found = [
            linear(states, weight.t().contiguous().t()) + bias,
            linear_binary("add", other, states, weight, bias) - other,
            linear_binary("mul", other, states, weight, bias) / other,
        ]
        gated = linear_silu(states, weight, bias)
    except (AttributeError, RuntimeError):
        return False
    right = [torch.allclose(result, plain, atol=1e-5) for result in found]
    return all(right) and torch.allclose(gated, functional.silu(plain), atol=1e-5)
