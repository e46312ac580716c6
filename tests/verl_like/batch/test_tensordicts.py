"""A batch as one TensorDict and back."""

import pytest
import torch

from tests.verl_like.batches import assert_same
from verl_like.batch.protocol import DataProto
from verl_like.errors import BatchError


def test_a_tensordict_round_trip_keeps_objects_and_meta():
    data = DataProto.from_dict(
        {"a": torch.zeros(3)},
        {"o": [[1, 2], {"k": None}, "x"]},
        {"eos": [1, 2], "t": 0.5, "d": {"x": (1,)}},
    )
    assert_same(DataProto.from_tensordict(data.to_tensordict()), data)
    assert_same(DataProto.from_tensordict(data[:0].to_tensordict()), data[:0])
    objects_only = data.select(batch_keys=[])
    objects_only.batch = None
    assert_same(DataProto.from_tensordict(objects_only.to_tensordict()), objects_only)


def test_columns_and_meta_need_different_names_in_a_tensordict():
    for clashing in (
        DataProto.from_dict({"a": torch.zeros(1)}, {"a": ["x"]}),
        DataProto.from_dict({"a": torch.zeros(1)}, meta_info={"a": 1}),
    ):
        with pytest.raises(BatchError, match="'a' is a"):
            clashing.to_tensordict()
