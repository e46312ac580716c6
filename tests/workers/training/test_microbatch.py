from __future__ import annotations

import pytest
import torch

from tests.workers.samples import make_batch
from verl_like.batch.columns import same_value
from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import RaggedTensor
from verl_like.batch.split import split_rows
from verl_like.errors import BatchError, ConfigError
from workers.training.engine import INPUTS
from workers.training.microbatch import (
    Cuts,
    MicroBatchBudget,
    Rows,
    count_mini_batches,
    micro_batches,
    mini_batch,
)
from workers.training.passes.forward_backward import Reading
from workers.training.passes.packing import RowPasses

CPU = torch.device("cpu")
NAMES = ("responses", "response_mask", "attention_mask")
PACKED, PADDED = RowPasses("packed"), RowPasses("padded")


def numbered(num_rows: int) -> DataProto:
    batch = make_batch(num_rows)
    batch.batch["responses"][:, 0] = torch.arange(num_rows)
    return batch


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_a_mini_batch_has_the_same_samples_on_any_number_of_ranks(world_size: int) -> None:
    seen: list[list[int]] = [[], [], []]
    for chunk in split_rows(numbered(12), world_size):
        rows = Rows.from_batch(chunk, NAMES, world_size)
        for index in range(3):
            chosen = mini_batch(rows, index, 3, None)
            seen[index] += chosen.columns["responses"].padded()[:, 0].tolist()
    assert seen == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_pad_rows_are_dropped_and_restored_as_zeros() -> None:
    last = split_rows(numbered(7), 3)[2]
    rows = Rows.from_batch(last, NAMES, 3)
    assert rows.columns["responses"].padded()[:, 0].tolist() == [6]
    assert (rows.places.tolist(), rows.total) == ([6], 7)
    assert rows.restore([torch.ones(1, 4)], [[0]]).sum(dim=1).tolist() == [4.0, 0.0, 0.0]


@pytest.mark.parametrize("holes", [False, True])
def test_padded_and_ragged_columns_give_the_same_rows(holes: bool) -> None:
    dense = make_batch(6).select(INPUTS)
    spans = Rows.from_batch(dense, INPUTS).columns
    if holes:
        dense.batch["response_mask"][:, 1:3] = 0
    ragged = DataProto.from_dict(
        {name: spans[name].like(column) for name, column in dense.columns.items()}
    )
    for ours, theirs in ((ragged, dense), (split_rows(ragged, 4)[2], split_rows(dense, 4)[2])):
        rows, other = (
            Rows.from_batch(data, INPUTS, 4 if data.shard else 1) for data in (ours, theirs)
        )
        assert same_value(rows.columns, other.columns)

        mask = rows.columns["response_mask"]
        ones = mask[1:].with_values(torch.ones(len(mask[1:].values)))
        order = [list(range(1, len(rows)))]
        restored, rectangle = (taken.restore([ones], order) for taken in (rows, other))
        assert isinstance(restored, RaggedTensor)
        assert isinstance(rectangle, torch.Tensor)
        assert torch.equal(restored.padded(), rectangle)
        assert rectangle.shape == ours.column("responses").shape
        assert rectangle.sum() == ones.values.sum()


def test_counts_of_a_mini_batch_leave_out_rows_without_a_response() -> None:
    batch = make_batch(4)
    batch.batch["response_mask"][1] = 0
    chosen = mini_batch(Rows.from_batch(batch, NAMES), 0, 1, None)
    assert chosen.num_rows == 3
    assert chosen.num_tokens == int(batch.batch["response_mask"].sum())


def test_a_rank_without_rows_runs_dummies_of_one_token_without_loss() -> None:
    columns = Rows.from_batch(make_batch(3), INPUTS).columns
    ((dummy, real),) = micro_batches(columns, [], None)
    assert real == 0
    assert dummy["response_mask"].padded().sum() == 0
    for row_passes in (PACKED, PADDED):
        padded = row_passes.feed(dummy, Reading().reads(dummy), CPU)
        assert padded.inputs["input_ids"].shape == (1, 1)
        assert padded.reads.sum() == 0


def cut(lengths: list[int], budget: MicroBatchBudget, row_passes: RowPasses = PACKED) -> Cuts:
    """Cut rows of these lengths, in which every token is read."""
    rows = RaggedTensor.from_rows([torch.ones(n, dtype=torch.bool) for n in lengths], max(lengths))
    return row_passes.cut(rows, budget)


def test_micro_batches_take_the_longest_rows_first_and_leave_out_empty_ones() -> None:
    assert cut([3, 0, 9, 5, 4], MicroBatchBudget(rows=2)) == [[2, 3], [4, 0]]


def test_a_token_budget_is_filled_and_never_exceeded() -> None:
    lengths = [3, 9, 5, 4, 1, 7]
    cuts = cut(lengths, MicroBatchBudget(tokens=12))
    assert [[lengths[row] for row in rows] for rows in cuts] == [[9], [7, 5], [4, 3, 1]]


def test_padded_rows_cost_their_rectangle() -> None:
    lengths = [6, 2, 2, 5]
    cuts = cut(lengths, MicroBatchBudget(tokens=12), PADDED)
    assert [[lengths[row] for row in rows] for rows in cuts] == [[6, 5], [2, 2]]


@pytest.mark.parametrize(
    ("total", "size", "nearest"), [(12, 5, "4 or 6"), (7, 2, "1 or 7"), (4, 0, "1")]
)
def test_a_mini_batch_size_that_does_not_divide_is_rejected(
    total: int, size: int, nearest: str
) -> None:
    with pytest.raises(ConfigError, match=f"nearest that do: {nearest}\\."):
        count_mini_batches(total, size)


def test_a_micro_batch_of_no_samples_is_rejected() -> None:
    with pytest.raises(ConfigError, match="a micro-batch needs at least 1 row or token"):
        cut([4], MicroBatchBudget(rows=0))


@pytest.mark.parametrize("sizes", [{}, {"rows": 2, "tokens": 8}])
def test_a_budget_counts_either_rows_or_tokens(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="needs either rows or tokens"):
        MicroBatchBudget(**sizes)


def test_several_ranks_reject_a_batch_that_was_not_split_for_them() -> None:
    with pytest.raises(BatchError, match="worker group"):
        Rows.from_batch(make_batch(4), NAMES, num_ranks=2)
    with pytest.raises(
        BatchError, match="split for 4 ranks, but the model's rows are divided over 2"
    ):
        Rows.from_batch(split_rows(make_batch(4), 4)[0], NAMES, num_ranks=2)


def test_rows_above_the_border_are_in_separate_micro_batches() -> None:
    lengths = [5, 20, 16, 0, 17, 3]
    passes = RowPasses("packed", border=16)
    assert cut(lengths, MicroBatchBudget(rows=4), passes) == [[1, 4], [2, 0, 5]]
    assert cut(lengths, MicroBatchBudget(tokens=40), passes) == [[1, 4], [2, 0, 5]]

    sides = [torch.ones(n, dtype=torch.bool) for length in lengths for n in (length, 0)]
    pairs = RaggedTensor.from_rows(sides, max(lengths)).unflatten(0, (-1, 2))
    assert passes.cut(pairs, MicroBatchBudget(rows=4)) == [[1], [4], [2], [0], [5]]
    with pytest.raises(ConfigError, match="a row of 20 tokens exceeds"):
        passes.cut(pairs, MicroBatchBudget(tokens=18))
