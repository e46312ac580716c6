"""Rows move between ranks, never between mini-batches, and only to reduce a rank's work."""

from __future__ import annotations

import pytest
import torch

from trainer.ppo.sampling import balance_ranks
from verl_like.batch.protocol import DataProto


def batch_of(lengths: list[int]) -> DataProto:
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return DataProto.from_dict({"attention_mask": mask, "row": torch.arange(len(lengths))})


def tokens(batch: DataProto, num_ranks: int) -> list[int]:
    return [int(chunk.batch["attention_mask"].sum()) for chunk in batch.chunk(num_ranks)]


def test_ranks_get_similar_token_counts_and_mini_batches_keep_their_rows() -> None:
    torch.manual_seed(0)
    lengths = sorted(torch.randint(1, 100, (96,)).tolist())
    num_ranks, num_mini_batches = 4, 3
    balanced, metrics = balance_ranks(batch_of(lengths), num_ranks, num_mini_batches)
    rank_tokens = tokens(balanced, num_ranks)
    assert max(rank_tokens) - min(rank_tokens) <= 3
    for index in range(num_mini_batches):
        rows = balanced.batch["row"][index::num_mini_batches].tolist()
        assert sorted(rows) == list(range(index, len(lengths), num_mini_batches))
        sums = tokens(balanced.select_idxs(range(index, 96, num_mini_batches)), num_ranks)
        assert max(sums) - min(sums) <= 3
    unbalanced = tokens(batch_of(lengths), num_ranks)
    assert metrics == {
        "global_seqlen/min": min(unbalanced),
        "global_seqlen/max": max(unbalanced),
        "global_seqlen/minmax_diff": max(unbalanced) - min(unbalanced),
        "global_seqlen/balanced_min": min(rank_tokens),
        "global_seqlen/balanced_max": max(rank_tokens),
        "global_seqlen/mean": sum(lengths) / num_ranks,
    }


def test_mini_batches_are_balanced_even_if_the_ranks_already_are() -> None:
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
    ids=[
        "one rank",
        "uneven",
        "more mini-batches than rows of a rank",
        "equal lengths",
        "nothing to gain",
    ],
)
def test_rows_that_cannot_be_balanced_better_stay(
    lengths: list[int], num_ranks: int, num_mini_batches: int
) -> None:
    balanced, metrics = balance_ranks(batch_of(lengths), num_ranks, num_mini_batches)
    assert balanced.batch["row"].tolist() == list(range(len(lengths)))
    assert metrics["global_seqlen/balanced_max"] == metrics["global_seqlen/max"]
    assert metrics["global_seqlen/mean"] == sum(lengths) / num_ranks
