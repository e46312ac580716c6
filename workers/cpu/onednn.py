"""Linear layers on CPUs with oneDNN, whose kernels are specialized for the processor.

Torch uses MKL for float32 matrix products, which is fastest on Intel's processors, where updates
use it. On others with 512-bit vectors, oneDNN takes half the time. With two or more rows, its
result for a row does not depend on the other rows. The weights are read in place; nothing is packed
or copied.

Every number of rows needs a separate kernel. Its first use costs a third of a millisecond and 0.25
MiB. `limit_kernel_caches` bounds their number per process. `onednn_linears` changes the linear
layers inside a given module for passes forward and backward, never a class or another package.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

MAX_CACHED_KERNELS = 256
"""Maximum number of kernels per process, in each of the two caches."""
CACHE_LIMITS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables that bound the caches of oneDNN and torch."""


def limit_kernel_caches() -> None:
    """Bound the kernels of this process, unless the user has set a limit.

    By default each cache stores 1024 kernels. Both read their limit when the first kernel is built,
    so an engine calls this during construction, before it computes anything.
    """
    for name in CACHE_LIMITS:
        os.environ.setdefault(name, str(MAX_CACHED_KERNELS))


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


GRADIENT_ROWS = 1024
"""Rows that are transposed at a time for a weight's gradient; few enough to fit in the cache."""
MIN_MULTIPLICATIONS = 2**24
"""Smaller products use torch, because building a oneDNN kernel would take longer."""


class _OnednnFunction(torch.autograd.Function):
    """Compute states @ weight.t() + bias.

    The narrower factor of the weight's gradient is transposed in memory.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = states.reshape(-1, states.shape[-1])
        ctx.save_for_backward(flat, weight)
        result: Tensor = torch.ops.aten._unsafe_view(
            linear(flat, weight, bias), [*states.shape[:-1], len(weight)]
        )
        return result  # must not be a view for autograd, because FSDP2 attaches hooks to it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        flat, weight = ctx.saved_tensors
        grad_flat = grad.reshape(-1, grad.shape[-1])
        grad_states = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_states = linear(grad_flat, weight.t()).view(*grad.shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            grad_weight = _outer(grad_flat, flat)
        if ctx.needs_input_grad[2]:
            grad_bias = grad_flat.sum(dim=0)
        return grad_states, grad_weight, grad_bias


def _outer(grad: Tensor, states: Tensor) -> Tensor:
    """Return grad.t() @ states, block by block; the narrower factor is transposed in memory."""
    grad_is_narrow = grad.shape[1] <= states.shape[1]
    narrow, wide = (grad, states) if grad_is_narrow else (states, grad)

    total: Tensor | None = None
    for few, many in zip(narrow.split(GRADIENT_ROWS), wide.split(GRADIENT_ROWS), strict=True):
        few = few.t().contiguous()
        if total is None:
            total = linear(few, many.t())
        else:
            total = linear_binary("add", total, few, many.t())

    assert total is not None, "a batch has rows"
    return total if grad_is_narrow else total.t().contiguous()


_trained_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = _OnednnFunction.apply


@contextmanager
def onednn_linears(module: nn.Module) -> Iterator[None]:
    """Context in which large float32 linear layers use oneDNN; run the backward pass inside, too.

    Each layer gets a `forward` attribute that hides its class's method and is removed at the end.
    """
    with ExitStack() as stack:
        for child in module.modules():
            if type(child) is nn.Linear and "forward" not in vars(child):
                setattr(child, "forward", MethodType(_linear_forward, child))  # noqa: B010
                stack.callback(delattr, child, "forward")
        yield


def _linear_forward(module: Any, input: Tensor) -> Tensor:  # noqa: A002 - the name in torch
    weight, bias = module.weight, module.bias
    fits = input.dtype == weight.dtype and not torch.is_autocast_enabled(input.device.type)
    is_plain = supports(weight) and not isinstance(weight, DTensor)
    is_worth_it = input.numel() * len(weight) >= MIN_MULTIPLICATIONS

    compute = _trained_linear if fits and is_plain and is_worth_it else functional.linear
    return compute(input, weight, bias)
