"""DataProto's columns: construction, select, pop, rename, copies, and unknown names."""

import copy

import numpy as np
import pytest
import torch

from tests.verl_like.batches import assert_same, make
from verl_like.batch.protocol import DataProto
from verl_like.errors import BatchError, MissingColumnError


def test_from_single_dict_sorts_by_type():
    data = DataProto.from_single_dict({"a": torch.zeros(2), "b": np.array([1, 2])}, {"t": 1})
    assert list(data.batch.keys()) == ["a"]
    assert list(data.non_tensor_batch) == ["b"]
    assert data.meta_info == {"t": 1}


def test_select_takes_columns_and_does_not_change_the_batch():
    data = make(4, t=1, k=2)
    picked = data.select(["ids"], ["uid"], ["t"])
    assert list(picked.batch.keys()) == ["ids"]
    assert list(picked.non_tensor_batch) == ["uid"]
    assert picked.meta_info == {"t": 1}
    assert_same(data, make(4, t=1, k=2))
    assert_same(data.select(), data)
    assert list(data.select("ids").batch.keys()) == ["ids"]
    assert len(data.select([], [])) == 4


def test_pop_moves_columns_out():
    data = make(4, t=1, k=2)
    taken = data.pop(["ids"], ["uid"], ["t"])
    assert_same(taken, make(4, t=1).select(["ids"], ["uid"]))
    assert_same(data, make(4, k=2).select(["score"], ["weight"]))
    assert len(data.pop()) == 0
    data.pop(["score"], "weight")
    assert len(data) == 4


def test_rename_keeps_the_order_and_can_swap():
    data = make(4)
    assert data.rename("ids", "input_ids") is data
    assert list(data.batch.keys()) == ["input_ids", "score"]
    data.rename(["input_ids", "score"], ["score", "input_ids"])
    assert data.batch["score"].shape == (4, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d: d.select(["scores"]), "no tensor column 'scores'. Did you mean 'score'"),
        (
            lambda d: d.select(non_tensor_batch_keys=["uids"]),
            "no non-tensor column 'uids'. Did you mean 'uid'",
        ),
        (
            lambda d: d.select(meta_info_keys=["temprature"]),
            "meta_info 'temprature'. Did you mean 'temperature'",
        ),
        (lambda d: d.pop(["ids"], ["uids"]), "Did you mean 'uid'"),
        (lambda d: d.rename("scor", "x"), "Did you mean 'score'"),
    ],
)
def test_a_missing_column_suggests_the_nearest_name(call, message):
    data = make(4, temperature=1.0)
    with pytest.raises(MissingColumnError, match=message):
        call(data)
    assert_same(data, make(4, temperature=1.0))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (["ids"], ["a", "b"], "equally many"),
        (["ids", "ids"], ["a", "b"], "equally many"),
        ("ids", "score", "the same name"),
        (None, None, "both sides"),
    ],
)
def test_rename_rejects_names_that_do_not_pair(old, new, message):
    with pytest.raises(BatchError, match=message):
        make(4).rename(old, new)


def test_to_moves_in_place():
    data = make(2)
    assert data.to("cpu") is data
    assert data[:1].batch.device == torch.device("cpu")
    assert DataProto().to("cpu").batch is None


def test_a_copy_shares_tensors_and_a_deep_copy_shares_nothing():
    data = DataProto.from_dict({"a": torch.zeros(1)}, {"o": [[1]]}, {"m": [1]})
    shared, deep = copy.copy(data), copy.deepcopy(data)
    shared.batch["new"] = torch.zeros(1)
    assert "new" not in data.batch.keys()
    deep.batch["a"][0] = 5
    deep.non_tensor_batch["o"][0][0] = 5
    deep.meta_info["m"][0] = 5
    assert data.batch["a"].item() == 0
    assert data.non_tensor_batch["o"][0] == [1]
    assert data.meta_info == {"m": [1]}
    shared.batch["a"][0] = 7
    assert data.batch["a"].item() == 7
