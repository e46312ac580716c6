"""Partitions of nearly equal length next to the best possible ones."""

import itertools
import random

import pytest
import torch

from verl_like.balance import (
    get_group_balanced_partitions,
    get_reverse_idx,
    get_seqlen_balanced_partitions,
)
from verl_like.errors import BatchError


def spread(lengths, partitions):
    sums = [sum(lengths[row] for row in rows) for rows in partitions]
    return max(sums) - min(sums)


@pytest.mark.parametrize("equal_size", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_partitions_have_every_row_once_and_none_is_empty(seed, equal_size):
    rng = random.Random(seed)
    k = rng.randint(1, 5)
    num_rows = k * rng.randint(1, 6) if equal_size else k + rng.randint(0, 20)
    lengths = [rng.choice([0, 1, 1, rng.randint(0, 500)]) for _ in range(num_rows)]
    partitions = get_seqlen_balanced_partitions(lengths, k, equal_size)
    assert sorted(itertools.chain(*partitions)) == list(range(num_rows))
    assert len(partitions) == k
    assert all(partitions)
    if equal_size:
        assert {len(rows) for rows in partitions} == {num_rows // k}


@pytest.mark.parametrize("seed", range(5))
def test_two_equal_partitions_are_near_the_optimum(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 100) for _ in range(8)]
    halves = (set(half) for half in itertools.combinations(range(8), 4))
    best = min(spread(lengths, [half, set(range(8)) - half]) for half in halves)
    ours = spread(lengths, get_seqlen_balanced_partitions(lengths, 2, equal_size=True))
    contiguous = spread(lengths, [range(4), range(4, 8)])
    assert best <= ours <= max(best + 20, contiguous // 4)


def test_a_large_batch_is_balanced_to_a_thousandth():
    rng = random.Random(0)
    lengths = [rng.randint(1, 4000) for _ in range(1024)]
    for k, equal_size in itertools.product((2, 7, 8), (False, True)):
        if not equal_size or len(lengths) % k == 0:
            assert (
                spread(lengths, get_seqlen_balanced_partitions(lengths, k, equal_size))
                <= sum(lengths) / k / 1000
            )


def test_equal_lengths_are_partitioned_deterministically():
    partitions = get_seqlen_balanced_partitions([5] * 6, 3, equal_size=True)
    assert partitions == [[0, 5], [1, 4], [2, 3]]
    assert get_seqlen_balanced_partitions([5, 5], 2) == [[0], [1]]


def test_impossible_partitions_are_rejected():
    with pytest.raises(BatchError, match="cannot split 2 rows into 3"):
        get_seqlen_balanced_partitions([1, 2], 3)
    with pytest.raises(
        BatchError, match="cannot split 7 rows into 2 partitions of equal size. .* or 6 rows"
    ):
        get_seqlen_balanced_partitions([1] * 7, 2, equal_size=True)


def test_the_reverse_index_undoes_a_reordering():
    order = list(itertools.chain(*get_seqlen_balanced_partitions([9, 1, 5, 7, 3, 3], 2)))
    rows = torch.arange(6)
    assert rows[order][get_reverse_idx(order)].tolist() == rows.tolist()


def test_rows_of_one_uid_stay_in_one_partition():
    uids = [0, 1, 2, 3, 0, 1, 2, 3]
    lengths = [100, 200, 150, 50, 110, 210, 160, 40]
    parts = get_group_balanced_partitions(lengths, uids, 2)
    assert parts == [[0, 2, 4, 6], [1, 3, 5, 7]]


@pytest.mark.parametrize(
    ("uids", "k", "words"),
    [([0, 0, 1], 3, "cannot split 2 uids into 3"), ([0], 1, "3 lengths and 1 uids")],
)
def test_groups_that_do_not_divide_are_rejected(uids, k, words):
    with pytest.raises(BatchError, match=words):
        get_group_balanced_partitions([1, 2, 3], uids, k)
