"""Rows move between ranks, never between mini-batches, and only to reduce a rank's work."""

from __future__ import annotations

import pytest
import torch

from trainer.ppo.sample import balance_ranks
from verl_like.batch.protocol import DataProto


def batch_of(lengths: list[int]) -> DataProto:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return DataProto.from_dict({"attention_mask": mask, "row": torch.arange(len(lengths))})


def tokens(batch: DataProto, num_ranks: int) -> list[int]:
    return [int(chunk.batch["attention_mask"].sum()) for chunk in batch.chunk(num_ranks)]


def test_ranks_get_like_numbers_of_tokens_and_mini_batches_keep_their_rows() -> None:
    torch.manual_seed(0)
    lengths = sorted(torch.randint(1, 100, (96,)).tolist())
    num_ranks, num_mini_batches = 4, 3
    before = batch_of(lengths)
    balanced, metrics = balance_ranks(batch_of(lengths), num_ranks, num_mini_batches)
    of_ranks = tokens(balanced, num_ranks)
    assert max(of_ranks) - min(of_ranks) <= 3
    for index in range(num_mini_batches):
        rows = balanced.batch["row"][index::num_mini_batches].tolist()
        assert sorted(rows) == list(range(index, len(lengths), num_mini_batches))
        of_mini_batch = [
            balanced.batch["attention_mask"][index::num_mini_batches][r * 8 : r * 8 + 8]
            for r in range(4)
        ]
        sums = [int(part.sum()) for part in of_mini_batch]
        assert max(sums) - min(sums) <= 3
    unbalanced = tokens(before, num_ranks)
    assert metrics == {
        "global_seqlen/min": min(unbalanced),
        "global_seqlen/max": max(unbalanced),
        "global_seqlen/minmax_diff": max(unbalanced) - min(unbalanced),
        "global_seqlen/balanced_min": min(of_ranks),
        "global_seqlen/balanced_max": max(of_ranks),
        "global_seqlen/mean": sum(lengths) / num_ranks,
    }


def test_a_mini_batch_is_balanced_although_the_ranks_have_like_sums() -> None:
    balanced, metrics = balance_ranks(
        batch_of([9, 1, 9, 1, 1, 9, 1, 9]), num_ranks=2, num_mini_batches=2
    )
    assert metrics["global_seqlen/minmax_diff"] == 0
    for index in range(2):
        assert tokens(balanced.select_idxs(range(index, 8, 2)), 2) == [10, 10]


@pytest.mark.parametrize(
    ("lengths", "num_ranks", "num_mini_batches"),
    [
        ([9, 1, 1, 1], 1, 2),
        ([9, 8, 1], 2, 1),
        ([9, 8, 1, 2], 2, 4),
        ([4, 4, 4, 4], 2, 1),
        ([9, 1, 8, 1], 2, 1),
    ],
    ids=["one rank", "uneven", "more mini-batches than rows of a rank", "alike", "nothing to gain"],
)
def test_balanced_rows_stay(lengths: list[int], num_ranks: int, num_mini_batches: int) -> None:
    balanced, metrics = balance_ranks(batch_of(lengths), num_ranks, num_mini_batches)
    assert balanced.batch["row"].tolist() == list(range(len(lengths)))
    assert metrics["global_seqlen/balanced_max"] == metrics["global_seqlen/max"]
    assert metrics["global_seqlen/mean"] == sum(lengths) / num_ranks
