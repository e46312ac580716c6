"""FlashAttention over packed rows: kernels that take the rows' bounds, and so compute no padding.

`find_kernel` chooses the first that runs here, once per engine, and every layer calls the kernel.
Where there is none, `workers.training.attention` lays rows in rectangles.

    flash-attn    flash_attn_varlen_func: windows, grouped heads, soft-capping
    torch         torch.nn.attention.varlen.varlen_attn: windows, grouped heads
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from workers.models.attention import warn_once, why_no_flash, why_no_kernel
from workers.training.attention import Attend, RowLayout, VarlenKernel, packed_attention

LARGEST_ERROR = 0.05
"""How far outputs and gradients in 16 bits may be off, over the largest of them."""
KERNEL_ERRORS = (ImportError, AttributeError, TypeError, RuntimeError, NotImplementedError)
"""What a library raises where it is not built for this machine, or has another signature."""


def through_flash_attn(function: Callable[..., Any]) -> Attend:
    """Attention by flash-attn's `flash_attn_varlen_func`."""

    def attend(*rows: Any, scale: float, left: int, cap: float) -> Tensor:
        capped = {"softcap": cap} if cap else {}
        output: Tensor = function(
            *rows, causal=True, softmax_scale=scale, window_size=(left, 0), **capped
        )
        return output

    return attend


def through_torch(function: Callable[..., Any]) -> Attend:
    """Attention by torch's `varlen_attn`.

    Its first versions take as many heads of keys as of queries.
    """
    is_grouped = "enable_gqa" in inspect.signature(function).parameters

    def attend(*rows: Any, scale: float, left: int, cap: float) -> Tensor:
        query, key, value, *where = rows
        grouped = {"enable_gqa": True} if is_grouped else {}
        if not is_grouped:
            groups = query.shape[1] // key.shape[1]
            key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        states = query, key, value
        output: Tensor = function(*states, *where, scale=scale, window_size=(left, 0), **grouped)
        return output

    return attend


def find_kernel(
    wanted: str, device: torch.device, dtype: torch.dtype
) -> tuple[VarlenKernel | None, str]:
    """The kernel for `model.attn_implementation`, if any runs here, and why no better one does."""
    if wanted not in ("auto", "flash_attention_2"):
        return None, f"model.attn_implementation={wanted}"
    reason = why_no_kernel(device, dtype)
    if reason:
        return None, reason

    kernel, reason = _checked(why_no_flash(device, dtype), _flash_attn, device, dtype)
    if kernel is not None:
        return kernel, ""
    kernel, other = _checked("", _torch_varlen, device, dtype)
    if wanted == "flash_attention_2":
        name = "sdpa" if kernel is None else kernel.name
        warn_once(f"attention: {name} in place of flash_attention_2: {reason}.")
    return kernel, f"{reason}; {other}" if other else reason


def _flash_attn(dtype: torch.dtype) -> VarlenKernel:
    library = importlib.import_module("flash_attn")
    attend = through_flash_attn(library.flash_attn_varlen_func)
    return VarlenKernel(f"flash-attn {library.__version__}", attend, dtype, has_softcap=True)


def _torch_varlen(dtype: torch.dtype) -> VarlenKernel:
    from torch.nn.attention.varlen import varlen_attn

    if "window_size" not in inspect.signature(varlen_attn).parameters:
        raise ImportError("its varlen_attn has no windows yet")
    return VarlenKernel("torch.nn.attention.varlen", through_torch(varlen_attn), dtype)


def _checked(
    reason: str,
    make: Callable[[torch.dtype], VarlenKernel],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[VarlenKernel | None, str]:
    """The kernel if it loads and is right on a few rows, or why not."""
    if reason:
        return None, reason
    name = make.__name__.strip("_")
    try:
        kernel = make(dtype)
        error = largest_error(kernel, device)
    except KERNEL_ERRORS as problem:
        return None, f"{name} does not run here: {' '.join(str(problem).split())[:200]}"
    if error >= LARGEST_ERROR:
        return None, f"{name} is off by {error:.2g} on a few rows"
    return replace(kernel, has_softcap=kernel.has_softcap and _caps(kernel, device)), ""


def _caps(kernel: VarlenKernel, device: torch.device) -> bool:
    try:
        return largest_error(kernel, device, softcap=0.5) < LARGEST_ERROR
    except KERNEL_ERRORS:
        return False


def largest_error(
    kernel: VarlenKernel, device: torch.device, softcap: float | None = None
) -> float:
    """How far outputs and gradients of short rows under a window are off those by rectangles."""
    layout, heads = RowLayout([3, 1, 40], device), (4, 2, 2)
    generator = torch.Generator().manual_seed(0)
    states = [
        torch.randn(1, count, 44, 64, generator=generator).to(device, kernel.dtype)
        for count in heads
    ]
    found = []
    for own in (kernel, None):
        q, k, v = leaves = [part.clone().requires_grad_() for part in states]
        output, _ = packed_attention(
            None, q, k, v, None, row_layout=layout, sliding_window=7, softcap=softcap, kernel=own
        )
        gradients = torch.autograd.grad(output.float().square().sum(), leaves)
        found.append([output.detach(), *gradients])
    errors = []
    for ours, theirs in zip(*found, strict=True):
        errors.append((ours - theirs).float().abs().max() / theirs.float().abs().max())
    return float(torch.stack(errors).max())
