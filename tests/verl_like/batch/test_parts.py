"""The parts of a batch: its rows, valid columns, and the shard that it came from."""

import copy
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.verl_like.batches import make
from verl_like.batch.protocol import DataProto, Shard
from verl_like.errors import BatchError


def test_length_comes_from_tensors_or_arrays_or_is_zero():
    assert len(make(3)) == 3
    assert len(DataProto.from_dict(non_tensors={"uid": ["a", "b"]})) == 2
    assert len(DataProto(TensorDict({}, batch_size=[5]))) == 5
    assert len(DataProto()) == 0


def test_columns_of_different_lengths_are_named_with_their_lengths():
    with pytest.raises(BatchError, match="'a' has 2, 'b' has 3"):
        DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(BatchError, match="'a' has 2, 'uid' has 1"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"uid": ["x"]})
    with pytest.raises(BatchError, match="has 2, 'uid' has 1"):
        DataProto(TensorDict({"a": torch.zeros(2)}, batch_size=[2]), {"uid": np.array(["x"])})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: DataProto.from_dict({"a": [1, 2]}), "'a' is of type list"),
        (lambda: DataProto.from_dict({"a": torch.tensor(1.0)}), "'a' is without rows"),
        (lambda: DataProto.from_dict({"a": torch.eye(2).to_sparse()}), "'a' is of layout"),
        (lambda: DataProto.from_dict(non_tensors={"a": "xy"}), "'a' is of type str"),
        (
            lambda: DataProto.from_dict(non_tensors={"a": np.array(1)}),
            "'a' is an array without rows",
        ),
        (lambda: DataProto.from_dict(non_tensors={1: ["x"]}), "column 1 is not"),
        (
            lambda: DataProto.from_dict({"a": torch.zeros(2, 2)}, num_batch_dims=2),
            "one batch dim, not 2",
        ),
        (lambda: DataProto.from_single_dict({"a": [1]}), "'a' has the type list"),
        (lambda: DataProto({"a": torch.zeros(2)}), "batch is not a TensorDict"),
        (lambda: DataProto(TensorDict({}, batch_size=[2, 3])), r"\(2, 3\)"),
        (lambda: DataProto.from_tensordict(TensorDict({}, batch_size=[])), r"\(\)"),
    ],
)
def test_invalid_columns_are_rejected_by_name(build, message):
    with pytest.raises(BatchError, match=message):
        build()


def test_a_shard_marks_pad_rows_and_derived_batches_have_none():
    chunk = make(4)
    assert (chunk.num_real_rows, chunk.pad_mask.tolist()) == (4, [False] * 4)
    chunk.shard = Shard(index=1, count=2, start=4, rows=3, total=7)
    assert (chunk.num_real_rows, chunk.pad_mask.tolist()) == (3, [False, False, False, True])
    same_rows = [
        copy.copy(chunk),
        copy.deepcopy(chunk),
        chunk.writable_copy(),
        pickle.loads(pickle.dumps(chunk)),
        chunk.union(make(4)),
    ]
    assert all(data.shard == chunk.shard for data in same_rows)
    derived = [
        chunk[:2],
        chunk[[0]],
        chunk.select(),
        chunk.repeat(1),
        DataProto.concat([chunk]),
        chunk.pop(["ids"]),
    ]
    assert all(data.shard is None for data in derived)
    assert chunk.reorder([3, 2, 1, 0]).shard is None


def test_repr_names_the_columns():
    data = make(2, t=1.0)
    assert repr(data) == "DataProto(2 rows; columns: ids, score, uid, weight; meta: t)"
