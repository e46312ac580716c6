"""Which values are pickled before Ray's own pickler, and which are left to it."""

from __future__ import annotations

import pickle
import sys
from types import ModuleType

import numpy as np
import pytest
import ray
import torch
from ray import cloudpickle

from verl_like import DataProto
from verl_like.backends.ray.transport import PickledBatch, pickled


def test_a_packed_batch_is_read_back_without_copies_of_its_columns() -> None:
    columns = {"x": torch.randperm(3000), "half": torch.rand(3000).bfloat16()}
    data = DataProto.from_dict(columns, {"uid": list("abc") * 1000}, {"temperature": 0.5})
    inner: list[pickle.PickleBuffer] = []
    head = pickled(data, inner)
    assert head is not None
    outer: list[pickle.PickleBuffer] = []
    text = pickle.dumps(PickledBatch(head, inner), 5, buffer_callback=outer.append)
    assert sum(len(buffer.raw()) for buffer in outer) == 8 * 3000 + 2 * 3000
    back = pickle.loads(text, buffers=outer)
    assert all(torch.equal(back.batch[name], data.batch[name]) for name in columns)
    assert back.batch["x"].data_ptr() == data.batch["x"].data_ptr()
    assert np.array_equal(back.non_tensor_batch["uid"], data.non_tensor_batch["uid"])
    assert back.meta_info == {"temperature": 0.5}


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_values_with_object_references_are_left_to_ray() -> None:
    assert pickled(("actor", "update", (ray.put(1),), {})) is None
    assert pickled(("actor", "update", (), {"more": [{"reference": ray.put(1)}]})) is None
    assert pickled(("actor", "update", (1,), {})) is not None


def test_functions_and_classes_without_a_module_are_left_to_ray(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    local = type("Own", (), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Own", local, raising=False)
    assert pickled(local()) is None
    assert pickled(lambda: 3) is None

    module = ModuleType("of_a_notebook")
    monkeypatch.setitem(sys.modules, "of_a_notebook", module)
    cloudpickle.register_pickle_by_value(module)
    try:
        assert pickled(1) is None
    finally:
        cloudpickle.unregister_pickle_by_value(module)
