"""Padding of token lists and sequences, and the positions of padded tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_2d_list_to_length(
    response: Sequence[Sequence[int]], pad_token_id: int, max_length: int | None = None
) -> Tensor:
    """Token lists as an int64 tensor, padded on the right to the longest.

    `max_length` pads further, and never cuts.
    """
    width = max([max_length or 0, *(len(tokens) for tokens in response)])
    padded = torch.full((len(response), width), pad_token_id, dtype=torch.int64)
    for row, tokens in enumerate(response):
        padded[row, : len(tokens)] = torch.as_tensor(tokens, dtype=torch.int64)
    return padded


def pad_sequence_to_length(
    tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False
) -> Tensor:
    """The last dim padded to `max_seq_len`, on the right or the left.

    A tensor that is as wide or wider is returned as it is.
    """
    missing = max_seq_len - tensors.shape[-1]
    if missing <= 0:
        return tensors
    sides = (missing, 0) if left_pad else (0, missing)
    return torch.nn.functional.pad(tensors, sides, value=pad_token_id)


def compute_position_ids(attention_mask: Tensor) -> Tensor:
    """Position of every token among its row's real ones, from 0.

    Padding before the first real token is at 0, too; padding after the last one repeats its
    position.
    """
    return (attention_mask.to(torch.int64).cumsum(dim=-1) - 1).clamp(min=0)
