"""One test for each trap of verl's DataProto, and of tensordict under it."""

import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from verl_like.batch.protocol import DataProto
from verl_like.errors import BatchError


def make(rows=4, **meta):
    """Return a tensor of row numbers, an object column and meta."""
    return DataProto.from_dict(
        {"a": torch.arange(rows).float()}, {"uid": [str(r) for r in range(rows)]}, meta
    )


@pytest.mark.parametrize(
    "pick",
    [
        lambda d: d[:2],
        lambda d: d[::1],
        lambda d: d.slice(0, 2),
        lambda d: d.chunk(2)[0],
        lambda d: d.split(2)[0],
        lambda d: d.repeat(1),
        lambda d: d.repeat(1, False),
        lambda d: DataProto.concat([d]),
        lambda d: d[0],
        lambda d: d.writable_copy(),
        lambda d: d.select(deepcopy=True),
    ],
)
def test_writing_into_selected_rows_does_not_change_the_batch(pick):
    data = DataProto.from_dict(
        {"a": torch.zeros(4, 2)}, {"uid": list("wxyz"), "n": np.zeros((4, 2))}
    )
    part = pick(data)
    part.batch["a"][...] = 9
    part.non_tensor_batch["n"][...] = 9
    part.meta_info["new"] = 1
    if isinstance(part, DataProto):
        part.non_tensor_batch["uid"][0] = "changed"
    assert data.batch["a"].sum() == 0
    assert data.non_tensor_batch["n"].sum() == 0
    assert data.non_tensor_batch["uid"].tolist() == list("wxyz")
    assert data.meta_info == {}


def test_new_columns_of_a_selection_do_not_appear_in_the_batch():
    data = make()
    data.select().batch["new"] = torch.zeros(4)
    data.select().non_tensor_batch["new"] = np.zeros(4)
    assert list(data.batch.keys()) == ["a"]
    assert list(data.non_tensor_batch) == ["uid"]


def test_a_new_batch_does_not_change_the_callers_dicts():
    tensors, non_tensors, meta = {"a": torch.zeros(2)}, {"uid": ["x", "y"]}, {"t": 1}
    data = DataProto.from_dict(tensors, non_tensors, meta, auto_padding=True)
    data.batch["b"], data.non_tensor_batch["c"], data.meta_info["d"] = (
        torch.zeros(2),
        np.zeros(2),
        1,
    )
    assert (list(tensors), non_tensors, meta) == (["a"], {"uid": ["x", "y"]}, {"t": 1})


def test_in_place_methods_do_not_change_the_callers_tensordict():
    tensors = TensorDict({"a": torch.zeros(2)}, batch_size=[2])
    DataProto(tensors).union(DataProto.from_dict({"b": torch.zeros(2)}))
    DataProto(tensors).rename("a", "z")
    DataProto(tensors).pop(["a"])
    assert list(tensors.keys()) == ["a"]


def test_union_does_not_share_the_others_tensordict():
    other = make()
    data = DataProto().union(other)
    data.batch["new"] = torch.zeros(4)
    assert list(other.batch.keys()) == ["a"]


@pytest.mark.parametrize(
    "rows",
    [[[1, 2], [3, 4]], [[1], [2, 3]], [(1, 2), (3, 4)], [np.zeros(2), np.zeros(2)], [[], []]],
)
def test_a_list_of_lists_is_a_column_of_lists(rows):
    for column in (
        DataProto.from_dict(non_tensors={"raw": rows}).non_tensor_batch["raw"],
        DataProto(non_tensor_batch={"raw": rows}).non_tensor_batch["raw"],
    ):
        assert (column.shape, column.dtype) == ((2,), object)
        assert column[0] is rows[0]


def test_nan_equals_nan_in_tensors_arrays_objects_and_meta():
    def with_nan():
        return DataProto.from_dict(
            {"a": torch.tensor([1.0, float("nan")])},
            {
                "n": np.array([np.nan, 1.0]),
                "o": [np.float32("nan"), {"x": [float("nan"), torch.tensor(float("nan"))]}],
            },
            {"t": float("nan")},
        )

    assert len(with_nan().union(with_nan())) == 2
    with pytest.raises(BatchError, match="first in row 0"):
        with_nan().union(DataProto.from_dict({"a": torch.tensor([float("nan"), float("nan")])}))


def test_one_byte_floats_can_be_compared():
    data = DataProto.from_dict({"a": torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)})
    assert data.union(DataProto.from_dict({"a": data.batch["a"].clone()})) is data
    with pytest.raises(BatchError, match="first in row 0"):
        data.union(
            DataProto.from_dict({"a": torch.tensor([2.0, float("nan")]).to(torch.float8_e4m3fn)})
        )


def test_tensors_and_arrays_in_meta_are_compared_by_value():
    data = make(t=torch.tensor([1, 2]), n=np.array([1, 2]), d={"x": [torch.zeros(2)]})
    assert (
        data.union(make(t=torch.tensor([1, 2]), n=np.array([1, 2]), d={"x": [torch.zeros(2)]}))
        is data
    )
    assert len(DataProto.concat([data, data])) == 8
    for conflict in (
        {"t": torch.tensor([1, 3])},
        {"n": np.array([1, 3])},
        {"t": [1, 2]},
        {"d": {"x": [torch.ones(2)]}},
    ):
        with pytest.raises(BatchError, match="meta_info"):
            data.union(make(**conflict))


def test_rows_without_columns_are_counted_by_concat():
    assert len(DataProto.concat([DataProto(), DataProto(TensorDict({}, batch_size=[5]))])) == 5


@pytest.mark.parametrize("order", [[1, 0], (1, 0), np.array([1, 0]), torch.tensor([1, 0])])
def test_reorder_takes_any_order_and_returns_the_batch(order):
    data = make(2)
    assert data.reorder(order) is data
    assert data.batch["a"].tolist() == [1, 0]
    assert data.non_tensor_batch["uid"].tolist() == ["1", "0"]


def test_a_view_is_pickled_without_the_rest_of_its_storage():
    wide = torch.zeros(1000, 1000)
    data = DataProto.from_dict(
        {"column": wide[:, 0], "rows": wide[:2].expand(2, 1000)[:, :2].repeat(500, 1)}
    )
    assert len(pickle.dumps(data, protocol=5)) < 20_000


def test_arrays_assigned_to_the_tensordict_are_rejected_by_name():
    data = make(2)
    data.batch["o"] = np.array(["x", "y"], dtype=object)
    with pytest.raises(BatchError, match="'o'"):
        data.check_consistency()
