"""Methods that select rows: which rows, in which order, and errors."""

import numpy as np
import pytest
import torch

from tests.verl_like.batches import assert_same, make, uids
from verl_like.batch.protocol import DataProto, DataProtoItem
from verl_like.errors import BatchError


def test_an_int_gives_one_row():
    item = make(4, t=1)[-1]
    assert isinstance(item, DataProtoItem)
    assert item.batch["ids"].tolist() == [6, 7]
    assert item.non_tensor_batch == {"uid": "3-0", "weight": 3.0}
    assert item.meta_info == {"t": 1}


def test_a_batch_iterates_over_its_rows():
    assert [item.non_tensor_batch["uid"] for item in make(3)] == ["0-0", "1-0", "2-0"]


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, -1), [3, 2, 1, 0]),
        (slice(None, None, 3), [0, 3]),
        (slice(7, 9), []),
        ([2, -1, 2], [2, 3, 2]),
        ([], []),
        ([True, False, False, True], [0, 3]),
        (np.array([3, 0], dtype=np.uint8), [3, 0]),
        (np.array([False, True, True, False]), [1, 2]),
        (torch.tensor([1, 1], dtype=torch.int32), [1, 1]),
        (torch.tensor([True, True, False, False]), [0, 1]),
    ],
)
def test_an_index_picks_the_same_rows_of_every_column(index, rows):
    picked = make(4, t=1)[index]
    assert picked.batch["score"].tolist() == rows
    assert uids(picked) == [f"{row}-0" for row in rows]
    assert picked.non_tensor_batch["weight"].dtype == np.float64
    assert picked.meta_info == {"t": 1}


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([0, 4], r"row 4 \(entry 1 of the index\)"),
        ([-5], "row -5"),
        ([True, False], "2 entries for 4 rows"),
        ([0.5], "float64"),
        (torch.zeros(2, 2, dtype=torch.int64), "one dim"),
        (torch.tensor(1), "one dim"),
    ],
)
def test_an_invalid_index_is_rejected_with_the_reason(index, message):
    with pytest.raises(BatchError, match=message):
        make(4)[index]


def test_other_index_types_are_type_errors():
    for index in ("uid", True, 1.0, (1, 2)):
        with pytest.raises(TypeError, match=type(index).__name__):
            make(4)[index]
    with pytest.raises(IndexError, match="4 rows"):
        make(4)[4]


def test_counts_below_one_are_rejected():
    for call in (make(2).chunk, make(2).split, make(2).unfold_column_chunks):
        with pytest.raises(BatchError, match="not 0"):
            call(0)


def test_repeat_zero_times_leaves_no_row():
    assert len(make(2).repeat(0)) == len(make(2).repeat(0, interleave=False)) == 0
    with pytest.raises(BatchError, match="not -1"):
        make(2).repeat(-1)


@pytest.mark.parametrize(
    "counts", [[2, 0, 1], (2, 0, 1), np.array([2, 0, 1]), torch.tensor([2, 0, 1])]
)
def test_sample_level_repeat_repeats_each_row_by_its_count(counts):
    assert uids(make(3).sample_level_repeat(counts)) == ["0-0", "0-0", "2-0"]


@pytest.mark.parametrize("counts", [[1, 2], [1, -1, 1], [0.5, 1, 1], 2])
def test_sample_level_repeat_needs_a_count_per_row(counts):
    with pytest.raises(BatchError, match="needs 3 integers of 0 or more"):
        make(3).sample_level_repeat(counts)


def test_unfold_column_chunks_turns_dim_1_into_rows():
    data = make(2).unfold_column_chunks(2, ["ids"])
    assert data.batch["ids"].tolist() == [[0], [1], [2], [3]]
    assert uids(data) == ["0-0", "0-0", "1-0", "1-0"]
    assert data.batch["score"].tolist() == [0, 0, 1, 1]
    with pytest.raises(BatchError, match=r"'ids' \(shape \(2, 2\)\)"):
        make(2).unfold_column_chunks(3, ["ids"])


def test_reorder_needs_a_permutation():
    with pytest.raises(BatchError, match="each of the 3 rows once"):
        make(3).reorder([0, 0, 1])


def test_make_iterator_covers_every_row_each_epoch_and_repeats_by_seed():
    data = make(6, t=1)
    by_seed = {"seed": 3, "dataloader_kwargs": {"shuffle": True}}
    shuffled, again = (
        [uids(part) for part in data.make_iterator(2, epochs=2, **by_seed)] for _ in range(2)
    )
    assert shuffled == again
    assert len(shuffled) == 6
    for epoch in (shuffled[:3], shuffled[3:]):
        assert sorted(sum(epoch, [])) == uids(data)
    assert shuffled[:3] != shuffled[3:]
    in_order = list(data.make_iterator(3, epochs=1))
    assert_same(DataProto.concat(in_order), data)
    assert in_order[0].non_tensor_batch["weight"].dtype == np.float64
    assert in_order[0].meta_info == {"t": 1}


def test_make_iterator_names_the_sizes_that_divide():
    with pytest.raises(BatchError, match=r"4 does not divide 6 rows; valid sizes: \[1, 2, 3, 6\]"):
        make(6).make_iterator(4, epochs=1)


def test_padding_appends_copies_of_the_last_or_first_row():
    data = make(2)
    assert data.padding(2) is data
    assert uids(data) == ["0-0", "1-0", "1-0", "1-0"]
    assert uids(make(2).padding(1, "first")) == ["0-0", "1-0", "0-0"]
    assert len(make(0).padding(0)) == 0
    for rows, size, candidate in ((0, 1, ""), (2, -1, ""), (2, 1, "middle")):
        with pytest.raises(BatchError, match="padd"):
            make(rows).padding(size, candidate)


def test_unfold_column_chunks_splits_the_lists_of_an_object_column():
    labels = [["a1", "a2"], ["b1", "b2", "b3", "b4"]]
    data = DataProto.from_dict({"x": torch.arange(2)}, {"labels": labels, "uid": ["a", "b"]})
    cut = data.unfold_column_chunks(2, ["labels"])
    assert cut.non_tensor_batch["labels"].tolist() == [["a1"], ["a2"], ["b1", "b2"], ["b3", "b4"]]
    assert cut.non_tensor_batch["uid"].tolist() == ["a", "a", "b", "b"]
    assert cut.batch["x"].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("bad", "words"), [(["b1"], "list of 1"), (7, "int 7"), ("ab", "str of 2")]
)
def test_a_list_that_does_not_divide_is_rejected_with_its_row(bad, words):
    data = DataProto.from_dict(non_tensors={"labels": [["a1", "a2"], bad]})
    with pytest.raises(
        BatchError, match=rf"row 1 of column 'labels' \({words}\) is not .* a multiple of 2"
    ):
        data.unfold_column_chunks(2, ["labels"])
