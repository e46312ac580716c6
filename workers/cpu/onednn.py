"""Linear layers on CPUs with oneDNN, whose kernels are specialized for the processor.

Torch uses MKL for float32 matrix products, which is fastest on Intel's processors, where updates
use it. On others with 512-bit vectors, oneDNN takes half the time. With two or more rows, its
result for a row does not depend on the other rows. The weights are read in place; nothing is packed
or copied.

Every number of rows needs a separate kernel. Its first use costs a third of a millisecond and 0.25
MiB. `limit_kernel_caches` bounds their number per process.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

KERNELS_KEPT = 256
"""Maximum number of kernels per process, in each of the two caches."""
CACHE_LIMITS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables that bound the caches of oneDNN and torch."""


def limit_kernel_caches() -> None:
    """Bound the kernels of this process, unless the user has set a limit.

    By default each cache stores 1024 kernels. Both read their limit when the first kernel is built,
    so an engine calls this during construction, before it computes anything.
    """
    for name in CACHE_LIMITS:
        os.environ.setdefault(name, str(KERNELS_KEPT))


def supports(weight: Tensor) -> bool:
    """True if oneDNN can use this weight: plain float32, on a CPU, and torch's calls work."""
    is_plain = type(weight) in (Tensor, nn.Parameter)  # an int8 weight reports float32, too
    return is_plain and weight.device.type == "cpu" and weight.dtype == torch.float32 and _works()


@functools.cache
def mkl_is_faster() -> bool:
    """True if torch multiplies many rows faster than oneDNN: on processors of Intel."""
    cpus = Path("/proc/cpuinfo")
    is_intel = cpus.is_file() and "GenuineIntel" in cpus.read_text(encoding="utf-8")
    return is_intel and torch.backends.mkl.is_available()


def linear(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `functional.linear` of [rows, in] and a weight [out, in] that `supports` accepts."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "none", [], "")
    return result


def linear_silu(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return silu(linear(states)), in one pass."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise(states, weight, bias, "swish", [], "")
    return result


def linear_binary(
    kind: Literal["add", "mul"],
    other: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Return other + linear(states) for "add", other * linear(states) for "mul", in one pass."""
    result: Tensor = torch.ops.mkldnn._linear_pointwise.binary(states, other, weight, bias, kind)
    return result


@functools.cache
def _works() -> bool:
    """True if torch has these operations, and they compute correct results.

    The operations are not public API, so a build may lack or change them.
    """
    states, weight = torch.linspace(-1, 1, 20).view(4, 5), torch.linspace(-1, 1, 15).view(3, 5)
    bias, other = torch.ones(3), states[:, :3] - 0.5
    plain = functional.linear(states, weight, bias)
    try:
        results = [
            linear(states, weight.t().contiguous().t()) + bias,
            linear_binary("add", other, states, weight, bias) - other,
            linear_binary("mul", other, states, weight, bias) / other,
        ]
        gated = linear_silu(states, weight, bias)
    except (AttributeError, RuntimeError):
        return False
    right = [torch.allclose(result, plain, atol=1e-5) for result in results]
    return all(right) and torch.allclose(gated, functional.silu(plain), atol=1e-5)
