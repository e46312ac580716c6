"""Micro-batches by tokens: complete, within the limit, with results in order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from verl_like import (
    DataProto,
    prepare_dynamic_batch,
    rearrange_micro_batches,
    restore_dynamic_batch,
)
from verl_like.batch import verl_compat
from verl_like.errors import BatchError, MissingColumnError

LENGTHS = [9, 3, 8, 2, 7, 7, 1, 6, 5, 4]


def padded(lengths: list[int] = LENGTHS) -> TensorDict:
    """Return rows of these lengths, numbered in `x`."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    columns = {"attention_mask": mask.long(), "x": torch.arange(len(lengths))}
    return TensorDict(columns, batch_size=[len(lengths)])


def jagged() -> TensorDict:
    """Return the same rows without padding."""
    ids = torch.nested.as_nested_tensor([torch.full((n,), n) for n in LENGTHS], layout=torch.jagged)
    return TensorDict({"input_ids": ids, "x": torch.arange(len(LENGTHS))}, batch_size=[10])


def totals(rows: list[list[int]], lengths: list[int] = LENGTHS) -> list[int]:
    return [sum(lengths[row] for row in part) for part in rows]


@pytest.mark.parametrize("batch", [padded(), jagged()], ids=["padded", "jagged"])
def test_micro_batches_have_every_row_once_within_the_limit(batch: TensorDict) -> None:
    for limit in (9, 13, 26, 52, 100):
        micro_batches, rows = rearrange_micro_batches(batch, limit)
        assert max(totals(rows)) <= limit
        assert sorted(itertools.chain(*rows)) == list(range(10))
        assert [part["x"].tolist() for part in micro_batches] == rows


def test_balancing_never_exceeds_the_limit() -> None:
    lengths = [6, 6, 6]  # 18 tokens are two times 9, and no two rows fit into 9
    _, rows = rearrange_micro_batches(padded(lengths), 9)
    assert len(rows) == 3


def test_the_lightest_micro_batches_are_first_and_last() -> None:
    _, rows = rearrange_micro_batches(padded([1, 9, 5, 7, 3]), 9, min_num_micro_batch=5)
    assert totals(rows, [1, 9, 5, 7, 3]) == [1, 5, 9, 7, 3]
    _, rows = rearrange_micro_batches(padded(), 26, use_dynamic_bsz_balance=False)
    assert rows == sorted(rows)


def test_the_number_of_micro_batches_obeys_a_minimum_and_a_divisor() -> None:
    assert len(rearrange_micro_batches(padded(), 26)[1]) == 2
    assert len(rearrange_micro_batches(padded(), 26, min_num_micro_batch=5)[1]) == 5
    assert len(rearrange_micro_batches(padded(), 26, num_batches_divided_by=4)[1]) == 4


def test_groups_stay_together() -> None:
    _, rows = rearrange_micro_batches(padded(), 15, force_group_size=2)
    assert all(part[0::2] == [row - 1 for row in part[1::2]] for part in rows)
    assert max(totals(rows)) <= 15


@pytest.mark.parametrize(
    ("limit", "options", "words"),
    [
        (8, {}, r"max_token_len=8 is below the 9 tokens of the longest row"),
        (11, {"force_group_size": 2}, r"below the 14 tokens of the longest row \(or group of 2\)"),
        (50, {"force_group_size": 3}, "10 rows do not divide into groups of force_group_size=3"),
        (50, {"min_num_micro_batch": 11}, "11 micro-batches cannot be made of 10 rows"),
    ],
)
def test_impossible_limits_and_groups_are_rejected(
    limit: int, options: dict[str, int], words: str
) -> None:
    with pytest.raises(BatchError, match=words):
        rearrange_micro_batches(padded(), limit, **options)


def test_a_batch_without_rows_is_rejected() -> None:
    with pytest.raises(BatchError, match="a batch without rows cannot be split"):
        rearrange_micro_batches(padded()[:0], 26)


def test_a_batch_without_lengths_is_rejected() -> None:
    with pytest.raises(MissingColumnError, match="need the column 'attention_mask'.*has: x"):
        rearrange_micro_batches(padded().exclude("attention_mask"), 26)


def test_ranks_agree_on_the_number_of_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank wants three, and accepts the common number."""
    others: Iterator[int] = iter([3, 3])
    monkeypatch.setattr(
        verl_compat, "_maximum", lambda own, group: max(own, next(others)) if group else own
    )
    group = dist.ProcessGroup.__new__(dist.ProcessGroup)
    assert len(rearrange_micro_batches(padded(), 26, dp_group=group)[1]) == 3
    assert len(rearrange_micro_batches(padded(), 26, group, same_micro_num_in_dp=False)[1]) == 2


def test_results_return_to_the_order_of_the_rows() -> None:
    uids = {"uid": [f"u{row}" for row in range(10)]}
    data = DataProto.from_dict(dict(padded().items()), uids, {"temperature": 0.5})
    parts, rows = prepare_dynamic_batch(data, 13)
    assert [uid for part in parts for uid in part.non_tensor_batch["uid"]] != uids["uid"]
    assert all(part.meta_info == {"temperature": 0.5} for part in parts)

    results = torch.cat([part.batch["x"] * 2 for part in parts])
    assert restore_dynamic_batch(results, rows).tolist() == [2 * row for row in range(10)]


def test_nested_results_return_to_the_order_of_the_rows() -> None:
    _, rows = rearrange_micro_batches(jagged(), 13)
    of_rows = [torch.full((LENGTHS[row],), row) for part in rows for row in part]
    restored = restore_dynamic_batch(
        torch.nested.as_nested_tensor(of_rows, layout=torch.jagged), rows
    )
    assert [row.tolist() for row in restored.unbind()] == [[n] * k for n, k in enumerate(LENGTHS)]


def test_results_with_missing_rows_are_rejected() -> None:
    with pytest.raises(BatchError, match="got 2 rows, but index lists of 3 rows"):
        restore_dynamic_batch(torch.zeros(2), [[0, 2], [1]])
