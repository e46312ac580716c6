"""Methods that select rows: which rows, in which order, and errors."""

import numpy as np
import pytest
import torch

from tests.verl_like.batches import make, uids
from verl_like.batch.protocol import DataProtoItem
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
    for call in (make(2).chunk, make(2).split):
        with pytest.raises(BatchError, match="not 0"):
            call(0)


def test_repeat_zero_times_leaves_no_row():
    assert len(make(2).repeat(0)) == len(make(2).repeat(0, interleave=False)) == 0
    with pytest.raises(BatchError, match="not -1"):
        make(2).repeat(-1)


def test_reorder_needs_a_permutation():
    with pytest.raises(BatchError, match="each of the 3 rows once"):
        make(3).reorder([0, 0, 1])
