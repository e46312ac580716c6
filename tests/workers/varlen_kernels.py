"""Stand-ins for the functions of flash-attn and torch, with their signatures, on any device."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    scale: float,
    window: tuple[int, int],
    cap: float,
    key_bounds: Tensor | None = None,
) -> Tensor:
    """Compute row by row, in float32; the window counts as in FlashAttention.

    The last query of a row is at its last key.
    """
    key_bounds = bounds if key_bounds is None else key_bounds
    assert bounds.dtype == key_bounds.dtype == torch.int32
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert query.shape[-1] % 8 == 0
    outputs = []
    lengths, key_lengths = (where.diff().tolist() for where in (bounds, key_bounds))
    queries = (part.transpose(0, 1).float() for part in query.split(lengths))
    states = (
        [part.transpose(0, 1).float() for part in every.split(key_lengths)]
        for every in (key, value)
    )
    for q, k, v in zip(queries, *states, strict=True):
        groups = len(q) // len(k)
        scores = q @ k.repeat_interleave(groups, 0).transpose(1, 2) * scale
        if cap:
            scores = cap * torch.tanh(scores / cap)
        count = k.shape[1]
        distance = torch.arange(count - q.shape[1], count)[:, None] - torch.arange(count)
        hidden = distance < -window[1] if window[1] >= 0 else torch.zeros_like(distance).bool()
        if window[0] >= 0:
            hidden = hidden | (distance > window[0])
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append((probs @ v.repeat_interleave(groups, 0)).transpose(0, 1))
    return torch.cat(outputs).to(query.dtype)


def check_longest(most_queries: int, bounds: Tensor, most_keys: int, key_bounds: Tensor) -> None:
    """Fail if a longest row is not that of its bounds."""
    assert most_queries == int(bounds.diff().max())
    assert most_keys == int(key_bounds.diff().max())


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """flash-attn's; causal attention sees nothing to the right."""
    assert softmax_scale is not None
    check_longest(max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k)
    window = (window_size[0], 0) if causal else window_size
    return reference(q, k, v, cu_seqlens_q, softmax_scale, window, softcap, cu_seqlens_k)


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    """torch's, from 2.12 on."""
    assert scale is not None
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert cu_seq_k is not None
    check_longest(max_q, cu_seq_q, max_k, cu_seq_k)
    return reference(query, key, value, cu_seq_q, scale, window_size, 0.0, cu_seq_k)


def varlen_attn_without_groups(
    *rows: Any, scale: float | None = None, window_size: tuple[int, int] = (-1, -1)
) -> Tensor:
    """torch's, before 2.12."""
    return varlen_attn(*rows, scale=scale, window_size=window_size)


def flash_attn_4_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    softcap: float = 0.0,
) -> tuple[Tensor, None]:
    """flash-attn-4's, with the parameters that it shares with others; it returns norms, too."""
    assert qv is None
    assert None not in (max_seqlen_q, max_seqlen_k)
    assert cu_seqlens_q is not None
    assert cu_seqlens_k is not None
    check_longest(max_seqlen_q or 0, cu_seqlens_q, max_seqlen_k or 0, cu_seqlens_k)
    assert causal
    assert softmax_scale is not None
    left = -1 if window_size[0] is None else window_size[0]
    assert window_size[0] is None or left >= 0
    window = left, 0
    return reference(q, k, v, cu_seqlens_q, softmax_scale, window, softcap, cu_seqlens_k), None


def package(name: str, function: Any = flash_attn_varlen_func) -> ModuleType:
    """Create a module and install it among the imported ones."""
    module: Any = ModuleType(name)
    module.flash_attn_varlen_func = function
    return module
