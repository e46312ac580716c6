"""Attention for decode steps of models whose query heads share keys and values. `native_rollout` switches it on.

transformers repeats the whole cache once per query head at every token, which costs more than the arithmetic. A decode
step has one query per head, so the heads of a group can stand as rows of one query instead, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "grouped_sdpa"


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """[rows, heads, queries, size] attends to [rows, groups, columns, size]; more than one query: as "sdpa" does it."""
    (rows, heads, num_queries, size), groups = query.shape, key.shape[1]
    if num_queries > 1 or heads == groups:
        output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
        return output, None
    grouped = query.reshape(rows, groups, heads // groups, size)
    output = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return output.reshape(rows, 1, heads, value.shape[3]), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def grouped_decoding(module: Any) -> Iterator[None]:
    """Within, a model that attends by "sdpa" through transformers' interface decodes by `grouped_attention`."""
    config = module.config.get_text_config()
    switch = config._attn_implementation == "sdpa" and getattr(module, "_supports_attention_backend", False)
    if switch:
        config._attn_implementation = NAME
    try:
        yield
    finally:
        if switch:
            config._attn_implementation = "sdpa"
