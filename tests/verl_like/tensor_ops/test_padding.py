"""Padding and positions."""

import torch

from verl_like.tensor_ops import (
    compute_position_ids,
    pad_2d_list_to_length,
    pad_sequence_to_length,
)


def test_token_lists_are_padded_on_the_right_to_the_longest_or_to_more():
    assert pad_2d_list_to_length([[1], [2, 3]], 9).tolist() == [[1, 9], [2, 3]]
    assert pad_2d_list_to_length([[1], [2, 3]], 9, max_length=3).tolist() == [[1, 9, 9], [2, 3, 9]]
    assert pad_2d_list_to_length([[1], [2, 3]], 9, max_length=1).shape == (2, 2)
    assert pad_2d_list_to_length([[], []], 9, max_length=2).tolist() == [[9, 9], [9, 9]]


def test_sequences_are_padded_on_either_side_and_never_cut():
    ids = torch.tensor([[1, 2]])
    assert pad_sequence_to_length(ids, 4, 0).tolist() == [[1, 2, 0, 0]]
    assert pad_sequence_to_length(ids, 4, 0, left_pad=True).tolist() == [[0, 0, 1, 2]]
    assert pad_sequence_to_length(ids, 1, 0) is ids


def test_position_ids_count_real_tokens():
    mask = torch.tensor(
        [[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]], dtype=torch.bool
    )
    assert compute_position_ids(mask).tolist() == [[0, 0, 0, 1, 2, 2], [0, 1, 2, 3, 4, 5], [0] * 6]
    assert compute_position_ids(mask).dtype == torch.int64
