"""FlashAttention over packed rows: kernels that take row boundaries and compute no padding.

`find_kernel` chooses the first kernel that runs here, once per engine. The engine logs it, and why
the ones before it do not run. Layers call it unless they have sinks, attention chunks, or a soft
cap that it does not support. Without a kernel, `workers.training.passes.attention` arranges rows in
rectangles.

    flash-attn-4    flash_attn.cute: Hopper and Blackwell (not 12.x, the GeForce RTX 50 series)
    flash-attn-3    flash_attn_interface: Hopper
    flash-attn      flash_attn: Ampere and newer
    torch           torch.nn.attention.varlen.varlen_attn

All support sliding windows and grouped heads; all except torch's support soft-capping. Gradients
are summed in a fixed order if `torch.use_deterministic_algorithms` is on.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from workers.models.attention import INSTALL_FLASH, kernel_blocker, warn_once
from workers.training.passes.attention import (
    LARGEST_HEAD,
    Attend,
    RowLayout,
    VarlenKernel,
    packed_attention,
)

LARGEST_ERROR = 0.05
"""Largest allowed error of 16-bit outputs and gradients, relative to the largest value."""


@dataclass(frozen=True)
class Library:
    """A package that provides FlashAttention."""

    package: str
    module: str
    capabilities: tuple[tuple[int, int], tuple[int, int]]
    """Compute capabilities: the first that it supports, and the first that it does not."""
    install: str
    unbounded: int | None = -1
    """Window size that means "no left limit"."""

    def load(self, dtype: torch.dtype) -> VarlenKernel:
        """Load the kernel of the package; raise if it is not installed."""
        function = importlib.import_module(self.module).flash_attn_varlen_func
        try:
            name = f"{self.package} {importlib.metadata.version(self.package)}"
        except importlib.metadata.PackageNotFoundError:
            name = self.package
        attend = flash_attn_kernel(function, self.unbounded)
        return VarlenKernel(name, attend, dtype, has_softcap=True)


LIBRARIES = {
    "flash_attention_4": Library(
        "flash-attn-4", "flash_attn.cute", ((9, 0), (12, 0)), 'pip install -e ".[flash]"', None
    ),
    "flash_attention_3": Library(
        "flash-attn-3",
        "flash_attn_interface",
        ((9, 0), (10, 0)),
        "from the folder hopper of flash-attention's sources",
    ),
    "flash_attention_2": Library(
        "flash-attn", "flash_attn.flash_attn_interface", ((8, 0), (99, 0)), INSTALL_FLASH
    ),
}
"""Libraries by the value of `model.attn_implementation`, the fastest first."""


def flash_attn_kernel(function: Callable[..., Any], unbounded: int | None = -1) -> Attend:
    """Return attention by a `flash_attn_varlen_func` of any version."""

    def attend(*rows: Any, scale: float, left: int, cap: float) -> Tensor:
        query, key, value, bounds, key_bounds, longest, most_keys = rows
        output = function(
            query,
            key,
            value,
            cu_seqlens_q=bounds,
            cu_seqlens_k=key_bounds,
            max_seqlen_q=longest,
            max_seqlen_k=most_keys,
            causal=True,
            softmax_scale=scale,
            window_size=(unbounded, 0) if left < 0 else (left, 0),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **({"softcap": cap} if cap else {}),
        )
        states: Tensor = output[0] if isinstance(output, tuple) else output  # with norms
        return states

    return attend


def torch_varlen_kernel(function: Callable[..., Any]) -> Attend:
    """Return attention by torch's `varlen_attn`.

    Its first versions need equally many key heads and query heads.
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
    setting: str,
    device: torch.device,
    dtype: torch.dtype,
    head_size: int = 64,
    needs_softcap: bool = False,
) -> tuple[VarlenKernel | None, str]:
    """Return the kernel for `model.attn_implementation` or None, and why no preferred one runs.

    Soft-capping is tried only if it is needed, because flash-attn-4 compiles a kernel for it.
    """
    if setting != "auto" and setting not in LIBRARIES:
        return None, f"model.attn_implementation={setting}"
    reason = kernel_blocker(device, dtype)
    if not reason and head_size > LARGEST_HEAD:
        reason = f"FlashAttention needs heads of at most {LARGEST_HEAD}, not {head_size}"
        if setting != "auto":
            warn_once(f"attention: using sdpa instead of {setting}: {reason}.")
    if reason:
        return None, reason

    reasons, capability = [], torch.cuda.get_device_capability(device)
    for name, library in LIBRARIES.items():
        suits = library.capabilities[0] <= capability < library.capabilities[1]
        if setting == name and not suits:
            at = ".".join(map(str, capability))
            reasons.append(f"{library.package} has no kernel for compute capability {at}")
        elif suits and setting in ("auto", name):
            kernel, reason = _checked(
                library.load, library, device, dtype, head_size, needs_softcap
            )
            if kernel is not None:
                return kernel, "; ".join(reasons)
            reasons.append(reason)

    kernel, reason = _checked(_torch_varlen, None, device, dtype, head_size, needs_softcap)
    if setting != "auto":
        name = "sdpa" if kernel is None else kernel.name
        warn_once(f"attention: using {name} instead of {setting}: {reasons[0]}.")
    return kernel, "; ".join(filter(None, [*reasons, reason]))


def _torch_varlen(dtype: torch.dtype) -> VarlenKernel:
    from torch.nn.attention.varlen import varlen_attn

    if "window_size" not in inspect.signature(varlen_attn).parameters:
        raise ImportError("its varlen_attn does not support sliding windows yet")
    return VarlenKernel("torch.nn.attention.varlen", torch_varlen_kernel(varlen_attn), dtype)


def _checked(
    load: Callable[[torch.dtype], VarlenKernel],
    library: Library | None,
    device: torch.device,
    dtype: torch.dtype,
    head_size: int,
    needs_softcap: bool,
) -> tuple[VarlenKernel | None, str]:
    """Return the kernel if it loads and is correct on a few rows; otherwise the reason."""
    name = "torch.nn.attention.varlen" if library is None else library.package
    try:
        kernel = load(dtype)
        error = largest_error(kernel, device, head_size)
    except Exception as problem:  # noqa: BLE001 - built for another machine, or a compiler error
        missing = getattr(problem, "name", None) if isinstance(problem, ImportError) else None
        if library is not None and missing and f"{library.module}.".startswith(f"{missing}."):
            return None, f"{name} is not installed ({library.install})"
        return None, f"{name} does not run here: {' '.join(str(problem).split())[:200]}"
    if error >= LARGEST_ERROR:
        return None, f"{name} is off by {error:.2g} on test rows"
    has_softcap = False
    if kernel.has_softcap and needs_softcap:
        with suppress(Exception):
            error = largest_error(kernel, device, head_size, softcap=0.5)
            has_softcap = error < LARGEST_ERROR
    return replace(kernel, has_softcap=has_softcap), ""


def largest_error(
    kernel: VarlenKernel, device: torch.device, head_size: int = 64, softcap: float | None = None
) -> float:
    """Return the largest error of outputs and gradients on short rows, relative to rectangles.

    The last of these rows shares its first tokens with the row before it.
    """
    heads = (4, 2, 2)
    generator = torch.Generator().manual_seed(0)
    states = [
        torch.randn(1, count, 44, head_size, generator=generator).to(device, kernel.dtype)
        for count in heads
    ]
    errors = []
    for window, layout in (
        (None, RowLayout([3, 1, 40], device)),
        (7, RowLayout([3, 1, 40], device)),
        (None, RowLayout([3, 30, 20], device, shared=[0, 0, 9])),
    ):
        results = []
        settings: Any = {"row_layout": layout, "sliding_window": window, "softcap": softcap}
        for kernel_or_none in (kernel, None):
            q, k, v = leaves = [part.clone().requires_grad_() for part in states]
            output, _ = packed_attention(None, q, k, v, None, kernel=kernel_or_none, **settings)
            gradients = torch.autograd.grad(output.float().square().sum(), leaves)
            results.append([output.detach(), *gradients])
        for ours, theirs in zip(*results, strict=True):
            errors.append((ours - theirs).float().abs().max() / theirs.float().abs().max())
    return float(torch.stack(errors).max())
