"""Ragged columns, and batches with them."""

import copy

import pytest
import torch

from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import RaggedTensor
from verl_like.errors import BatchError, MissingColumnError


def column(**options) -> RaggedTensor:
    return RaggedTensor.from_rows([torch.tensor([5, 6]), torch.tensor([7])], 3, **options)


def test_a_ragged_column_represents_a_rectangle():
    assert column().padded().tolist() == [[5, 6, 0], [7, 0, 0]]
    assert column(at_end=True, fill=9).padded().tolist() == [[9, 5, 6], [9, 9, 7]]
    assert (column().shape, column().dtype, len(column())) == ((2, 3), torch.int64, 2)
    rectangle = torch.arange(6).view(2, 3)
    assert column(at_end=True).like(rectangle).values.tolist() == [1, 2, 5]


def test_rows_may_have_several_spans_and_values_more_dims():
    values = torch.arange(10.0).view(5, 2).requires_grad_()
    pairs = RaggedTensor(values, torch.tensor([[2, 0], [1, 2]]), 3)
    assert pairs.shape == (2, 2, 3, 2)
    assert pairs.padded()[1].tolist() == [[[4, 5], [0, 0], [0, 0]], [[6, 7], [8, 9], [0, 0]]]
    assert torch.equal(pairs[1:].padded(), pairs.padded()[1:])
    assert torch.equal(pairs.index_select(0, torch.tensor([1, 0])).padded(), pairs.padded().flip(0))
    assert torch.equal(pairs.flatten().padded(), pairs.padded().flatten(0, 1))
    pairs.padded().sum().backward()
    assert values.grad is not None
    assert values.grad.eq(1).all()


def test_index_select_matches_the_rectangle_and_cuts_no_other_rows(monkeypatch):
    lengths = torch.arange(7) % 4
    longer = RaggedTensor(
        torch.arange(int(lengths.sum())), lengths, 5, torch.arange(7) % 2, fill=-1
    )
    pairs = RaggedTensor(torch.arange(6), torch.tensor([[2, 0], [1, 1], [0, 2]]), 3)
    rectangles = longer.padded(), pairs.padded()
    monkeypatch.delattr(RaggedTensor, "rows")
    for column, rectangle in zip((longer, pairs), rectangles, strict=True):
        for index in ([2, 0, 2], [1], [-1, 0], []):
            picked = column.index_select(0, torch.tensor(index, dtype=torch.int64))
            assert torch.equal(picked.padded(), rectangle[index])
            assert picked.values.data_ptr() != column.values.data_ptr() or not index


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: RaggedTensor(torch.zeros(3), torch.tensor([1, 1]), 3),
            "3 values has rows whose lengths sum to 2",
        ),
        (
            lambda: RaggedTensor(torch.zeros(2), torch.tensor([2]), 3, torch.tensor([2])),
            "width of 3",
        ),
        (lambda: RaggedTensor(torch.zeros(2), torch.tensor([2]), 1), "width of 1"),
    ],
)
def test_spans_that_do_not_fit_are_rejected(build, message):
    with pytest.raises(BatchError, match=message):
        build()


def test_a_batch_keeps_ragged_columns_until_rectangles_are_requested():
    data = DataProto.from_dict({"ids": column(), "index": torch.arange(2)}, {"uid": ["a", "b"]})
    assert isinstance(data.column("ids"), RaggedTensor)
    assert data.padded("ids").tolist() == [[5, 6, 0], [7, 0, 0]]
    assert isinstance(data.column("ids"), RaggedTensor)
    shared = copy.copy(data)
    assert data.batch is not None
    data.batch["ids"][0, 2] = 8
    assert data.padded("ids").tolist() == [[5, 6, 8], [7, 0, 0]]
    assert isinstance(shared.column("ids"), RaggedTensor)


def test_columns_are_set_in_place_and_checked():
    data = DataProto.from_dict({"ids": column()})
    assert data.set_columns({"ids": torch.zeros(2), "more": column()}) is data
    assert list(data.columns) == ["ids", "more"]
    with pytest.raises(BatchError, match="'the batch' has 2, 'x' has 3"):
        data.set_columns({"x": torch.zeros(3)})
    with pytest.raises(MissingColumnError, match="Did you mean 'more'"):
        data.column("mores")


def test_a_batch_with_only_ragged_columns_knows_its_rows():
    data = DataProto.from_dict({"ids": column()})
    assert len(data) == 2
    assert len(data.select([])) == 2
    assert len(data.pop(["ids"])) == 2
    assert len(data) == 2
    assert data.columns == {}
    assert len(DataProto().union(DataProto.from_dict({"ids": column()}))) == 2


def test_columns_of_different_widths_are_not_concatenated():
    wide = RaggedTensor.from_rows([torch.tensor([1])], 4)
    with pytest.raises(BatchError, match=r"\(1, 4\) in part 1, but torch.int64 \(2, 3\)"):
        DataProto.concat([DataProto.from_dict({"ids": c}) for c in (column(), wide)])
