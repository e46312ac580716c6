"""Linear layers that use oneDNN in an engine's passes, forward and backward.

Only layer instances inside the given module are changed, never a class or another package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from workers.cpu import onednn

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
            onednn.linear(flat, weight, bias), [*states.shape[:-1], len(weight)]
        )
        return result  # must not be a view for autograd, because FSDP2 attaches hooks to it

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        flat, weight = ctx.saved_tensors
        grad_flat = grad.reshape(-1, grad.shape[-1])
        grad_states = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_states = onednn.linear(grad_flat, weight.t()).view(*grad.shape[:-1], -1)
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
            total = onednn.linear(few, many.t())
        else:
            total = onednn.linear_binary("add", total, few, many.t())

    assert total is not None, "a batch has rows"
    return total if grad_is_narrow else total.t().contiguous()


_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = _OnednnFunction.apply


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
    is_plain = onednn.supports(weight) and not isinstance(weight, DTensor)
    is_worth_it = input.numel() * len(weight) >= MIN_MULTIPLICATIONS

    compute = _linear if fits and is_plain and is_worth_it else functional.linear
    return compute(input, weight, bias)
