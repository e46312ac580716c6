"""Union and concat: the merged entries, and the errors of conflicts."""

import numpy as np
import pytest
import torch

from tests.verl_like.batches import assert_same, make
from verl_like.batch.protocol import DataProto
from verl_like.errors import BatchError


def test_union_adds_in_place_and_returns_self():
    data = make(4, t=1)
    other = DataProto.from_dict(
        {"new": torch.zeros(4), "ids": data.batch["ids"].clone()}, {"n": [1, 2, 3, 4]}, {"u": 2}
    )
    assert data.union(other) is data
    assert set(data.batch.keys()) == {"ids", "score", "new"}
    assert data.non_tensor_batch["n"].tolist() == [1, 2, 3, 4]
    assert data.meta_info == {"t": 1, "u": 2}
    assert set(other.batch.keys()) == {"new", "ids"}


def test_union_with_an_empty_batch_gives_the_other_side():
    assert_same(DataProto().union(make(4, t=1)), make(4, t=1))
    assert_same(make(4, t=1).union(DataProto()), make(4, t=1))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            DataProto.from_dict({"score": torch.tensor([0.0, 1.0, 9.0, 9.0])}),
            r"'score' .*\(4,\) and \(4,\).*first in row 2",
        ),
        (DataProto.from_dict({"score": torch.zeros(4, 3)}), r"'score' .*\(4,\) and \(4, 3\)"),
        (DataProto.from_dict({"score": torch.arange(4)}), "float32 and torch.int64"),
        (
            DataProto.from_dict(non_tensors={"uid": ["0-0", "x", "y", "z"]}),
            "'uid' .*first in row 1",
        ),
        (
            DataProto.from_dict(non_tensors={"weight": np.array([0.0, 1.0, 2.0, np.nan])}),
            "'weight' .*first in row 3",
        ),
        (DataProto.from_dict({"other": torch.zeros(3)}), "4 and 3 rows"),
        (DataProto(meta_info={"t": 2}), r"meta_info\['t'\] is 1 and 2"),
    ],
)
def test_a_conflicting_union_names_the_place_and_changes_nothing(other, message):
    data = make(4, t=1)
    with pytest.raises(BatchError, match=message):
        data.union(other)
    assert_same(data, make(4, t=1))


def test_concat_collects_metrics_into_lists():
    parts = [
        make(1, metrics={"loss": 1.0, "only0": 5}),
        make(1, metrics=[{"loss": 2.0}, {"loss": 3.0}]),
        make(1),
        make(1, metrics=None),
    ]
    assert DataProto.concat(parts).meta_info == {"metrics": {"loss": [1.0, 2.0, 3.0], "only0": [5]}}
    with pytest.raises(BatchError, match="metrics of part 1"):
        DataProto.concat([make(1, metrics={}), make(1, metrics=3)])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "concat needs at least one batch"),
        ([make(2), make(2).select(["ids"])], r"part 1 lacks \['score'\], .* tensor columns"),
        (
            [make(2), make(2).select(None, ["uid"])],
            r"lacks \['weight'\], .* the non-tensor columns",
        ),
        ([make(2).select(["ids"]), make(2)], r"part 1 adds \['score'\], but"),
        ([make(2), DataProto()], r"part 1 lacks \['ids', 'score'\], but"),
        ([make(2), make(1, t=1), make(1, t=2)], r"part 2 .*meta_info\['t'\] is 1 and 2"),
        ([make(2), {"ids": 1}], "part 1 must be a DataProto, not dict"),
        (
            [
                DataProto.from_dict({"a": torch.zeros(1, 2)}),
                DataProto.from_dict({"a": torch.zeros(1, 3)}),
            ],
            r"'a' .*\(1, 3\) in part 1",
        ),
        (
            [
                DataProto.from_dict({"a": torch.zeros(1)}),
                DataProto.from_dict({"a": torch.zeros(1).bfloat16()}),
            ],
            "bfloat16",
        ),
    ],
)
def test_concat_names_the_batch_that_does_not_fit(parts, message):
    with pytest.raises(BatchError, match=message):
        DataProto.concat(parts)
