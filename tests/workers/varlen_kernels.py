"""Stand-ins for the functions of flash-attn and torch, with their signatures, on any device."""

from __future__ import annotations

import inspect
from collections.abc import Callable
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


PARAMETERS = {
    "flash_attention_2": (  # flash-attn 2.8.3.post2
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
        "deterministic=False, return_attn_probs=False, block_table=None"
    ),
    "flash_attention_3": (  # flash-attn-3 3.0.0, the folder hopper of its repository
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
        "seqused_k=None, softmax_scale=None, causal=False, qv=None, q_descale=None, "
        "k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
        "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
    ),
    "flash_attention_4": (  # flash-attn-4 4.0.0b36
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
        "max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, "
        "gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False, "
        "window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, "
        "deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None, "
        "block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, "
        "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False, "
        "gather_bwd_recompute_p=False, gather_bwd_token_chunk=None"
    ),
}
"""The parameters of `flash_attn_varlen_func` in each package, copied from its source."""
USED = (
    "q",
    "k",
    "v",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "softmax_scale",
    "causal",
    "window_size",
    "softcap",
    "deterministic",
)
"""Parameters that the stand-ins compute; the others must have their default."""


def signature_of(library: str) -> inspect.Signature:
    """Return the signature of a package's `flash_attn_varlen_func`."""
    return inspect.signature(eval(f"lambda {PARAMETERS[library]}: None"))


def flash_attn(library: str) -> Callable[..., Any]:
    """Return a stand-in for a package's `flash_attn_varlen_func`."""
    signature = signature_of(library)
    unbounded = None if library == "flash_attention_4" else -1

    def flash_attn_varlen_func(*args: Any, **settings: Any) -> Any:
        call = signature.bind(*args, **settings)
        call.apply_defaults()
        arguments = dict(call.arguments)
        for name, parameter in signature.parameters.items():
            assert name in USED or arguments[name] == parameter.default, name
        assert arguments["causal"]
        assert arguments["softmax_scale"] is not None
        assert isinstance(arguments["deterministic"], bool)
        bounds, key_bounds = arguments["cu_seqlens_q"], arguments["cu_seqlens_k"]
        check_longest(arguments["max_seqlen_q"], bounds, arguments["max_seqlen_k"], key_bounds)
        left, right = arguments["window_size"]
        assert left == unbounded or left >= 0
        assert right in (unbounded, 0)
        window = (-1 if left is None else left, 0)
        states = arguments["q"], arguments["k"], arguments["v"]
        scale, cap = arguments["softmax_scale"], arguments["softcap"]
        output = reference(*states, bounds, scale, window, cap, key_bounds)
        return (output, None) if library == "flash_attention_4" else output

    return flash_attn_varlen_func


flash_attn_varlen_func = flash_attn("flash_attention_2")


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


def package(name: str, function: Any = flash_attn_varlen_func) -> ModuleType:
    """Create a module and install it among the imported ones."""
    module: Any = ModuleType(name)
    module.flash_attn_varlen_func = function
    return module
