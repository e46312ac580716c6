"""Attention for decode steps: one query per head against the slots' keys.

transformers repeats the whole cache for every query head at every token, which costs more than the
arithmetic. A decode step has one query per head, so the heads of a group can be the rows of one
query instead, and nothing is copied. Two batched products are then faster than the general kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from workers.models.attention import override_attention

NAME = "grouped_sdpa"
"""Name of `grouped_attention` in the attention interface of transformers."""


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend from [rows, heads, queries, size] to [rows, groups, columns, size].

    With more than one query, use transformers' "sdpa".
    """
    rows, heads, num_queries, size = query.shape
    groups, columns = key.shape[1], key.shape[2]
    if num_queries > 1:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output, None

    grouped = query.reshape(rows * groups, heads // groups, size)
    keys = key.flatten(0, 1).transpose(1, 2)
    scale = size**-0.5 if scaling is None else scaling
    unused = grouped.new_empty(())  # not read, because beta=0
    scores = torch.baddbmm(unused, grouped, keys, beta=0, alpha=scale)
    scores.view(rows, heads, columns).add_(attention_mask[:, 0])

    probs = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    output = torch.bmm(probs, value.flatten(0, 1))
    return output.view(rows, 1, heads, value.shape[3]), None


def grouped_mask(*args: Any, q_length: int, **kwargs: Any) -> Tensor | None:
    """Return the boolean mask of "sdpa", or for one query a mask to add, shared by all layers."""
    mask: Tensor | None = sdpa_mask(*args, q_length=q_length, **kwargs)
    if q_length > 1 or mask is None:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)


@contextmanager
def grouped_decoding(module: Any) -> Iterator[None]:
    """Context in which a module that uses transformers' "sdpa" decodes by `grouped_attention`."""
    config = module.config.get_text_config()
    has_interface = getattr(module, "_supports_attention_backend", False)
    if config._attn_implementation != "sdpa" or not has_interface:
        yield
        return

    with override_attention(module, NAME, grouped_attention, grouped_mask):
        yield
