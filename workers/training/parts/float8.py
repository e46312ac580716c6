"""Linear layers that compute two of their three matrix products in float8: `model.fp8_linear`.

Outputs and input gradients are products of e4m3 numbers, with one scale per row of each factor, so
the result of a token does not depend on its neighbors. The weight gradient is a product in the
compute dtype, and weights and moments keep their dtypes. Micikevicius et al., "FP8 Formats for Deep
Learning" (arXiv 2209.05433).

Rollout engines do not round in this way, so the trainer's policy differs slightly from theirs. The
metric `training/rollout_probs_diff_mean` shows by how much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from verl_like.errors import ConfigError
from workers.models.causal_lm import replaced_forward
from workers.models.quantize import quantizable
from workers.models.support.proof import relative_error
from workers.parallel.dims import ParallelDims
from workers.training.model import Model, ModelPart

KIND = torch.float8_e4m3fn
LARGEST = torch.finfo(KIND).max
STEP = 16
"""Input and output sizes must be multiples of this for the kernels."""
FIRST_CAPABILITY = (8, 9)
LARGEST_ERROR = 0.1
"""Largest allowed relative error of products of random numbers; rounding causes 0.04."""


class _Float8Function(torch.autograd.Function):
    """states @ weight.t() + bias."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        flat = states.reshape(-1, states.shape[-1])
        ctx.save_for_backward(flat, weight)
        result = _product(flat, weight)
        if bias is not None:
            result = result + bias
        return result.view(*states.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        flat, weight = ctx.saved_tensors
        grad_flat = grad.reshape(-1, grad.shape[-1])
        grad_states = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_states = _product(grad_flat, weight.t()).view(*grad.shape[:-1], -1)
        if ctx.needs_input_grad[1]:
            grad_weight = grad_flat.t() @ flat
        if ctx.needs_input_grad[2]:
            grad_bias = grad_flat.sum(dim=0)
        return grad_states, grad_weight, grad_bias


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right.t(), with both factors rounded to float8 row by row."""
    (a, of_a), (b, of_b) = _rounded(left), _rounded(right)
    result: Tensor = torch._scaled_mm(
        a, b.t(), scale_a=of_a, scale_b=of_b.t(), out_dtype=left.dtype, use_fast_accum=left.is_cuda
    )
    return result


def _rounded(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Scale each row so that its largest number is LARGEST; return it in float8, and scales [rows,
    1].
    """
    scale = numbers.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-12) / LARGEST
    rounded = (numbers / scale).clamp(-LARGEST, LARGEST).to(KIND)
    return rounded.contiguous(), scale


_linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = _Float8Function.apply


class Float8(ModelPart):
    """Makes linear layers multiply in float8 during passes."""

    layers: Sequence[nn.Linear] = ()

    def check(self, model: Model) -> None:
        """Reject a device or compute dtype without float8 products, and tensor parallelism."""
        key = f"{model.model_config.SECTION}.fp8_linear"
        check_float8(model.device, model.precision.compute, model.dims, key)

    def finish(self, model: Model) -> None:
        """Choose the layers whose sizes the kernels support, except the head and routers."""
        self.layers = [
            layer
            for _, layer in quantizable(model.module)
            if layer.in_features % STEP == layer.out_features % STEP == 0
        ]

    def computing(self) -> AbstractContextManager[None]:
        """Context in which the layers multiply in float8; run the backward pass inside, too."""
        return float8_linears(self.layers)


@contextmanager
def float8_linears(layers: Sequence[nn.Linear]) -> Iterator[None]:
    """Context in which these layers multiply in float8; run the backward pass inside, too."""
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(replaced_forward(layer, MethodType(_forward, layer)))
        yield


def _forward(layer: Any, input: Tensor) -> Tensor:  # noqa: A002 - the name in torch
    takes = input.dtype == layer.weight.dtype == torch.bfloat16
    compute = _linear if takes else functional.linear
    return compute(input, layer.weight, layer.bias)


def check_float8(
    device: torch.device, compute: torch.dtype, dims: ParallelDims, key: str = "fp8_linear"
) -> None:
    """Reject a device or compute dtype without float8 products, and tensor parallelism."""
    reason = f"parallel.tp={dims.tp} splits linear layers" if dims.tp > 1 else ""
    if reason := reason or _why_not(device, compute):
        raise ConfigError(f"{key}: {reason}. Leave out {key}.")


def _why_not(device: torch.device, compute: torch.dtype) -> str:
    if compute != torch.bfloat16:
        return f"its products are in bfloat16, but passes compute in {compute} (compute_dtype)"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"float8 needs a GPU of compute capability 8.9 (Ada) or higher, not a {name}"
    generator = torch.Generator().manual_seed(0)
    sizes = (48, 64), (32, 64)
    states, weight = (
        torch.randn(size, generator=generator).to(device, compute).requires_grad_()
        for size in sizes
    )
    try:
        results = []
        for compute_by in (_linear, functional.linear):
            output = compute_by(states, weight, None)
            results.append([output.detach(), *torch.autograd.grad(output.sum(), [states, weight])])
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return f"this torch does not multiply float8 on {device.type} ({str(error)[:200]})"
    errors = [relative_error(ours, theirs) for ours, theirs in zip(*results, strict=True)]
    return "" if max(errors) < LARGEST_ERROR else f"products are off by {max(errors):.0%}"
