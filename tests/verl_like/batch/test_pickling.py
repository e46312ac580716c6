"""A pickled batch has its large columns out of band, and survives unchanged."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.verl_like.batches import DTYPES, assert_same, of_every_dtype
from verl_like.batch.columns import tensor_columns
from verl_like.batch.protocol import DataProto, Shard
from verl_like.batch.ragged import RaggedTensor


def out_of_band(data):
    buffers = []
    head = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    return head, buffers


def test_tensors_and_numeric_arrays_are_out_of_band():
    data = DataProto.from_dict(
        {"a": torch.rand(1000, 100), "b": torch.zeros(1000).bfloat16()},
        {"n": np.zeros(1000), "uid": ["x"] * 1000},
    )
    head, buffers = out_of_band(data)
    assert sorted(buffer.raw().nbytes for buffer in buffers) == [8000, 400_000]  # bf16's 2000 stay
    assert len(head) < 10_000
    assert_same(pickle.loads(head, buffers=buffers), data)


@pytest.mark.parametrize("rows", [0, 1, 3, 3000])
def test_every_dtype_survives_read_only_buffers_without_a_warning(rows):
    head, buffers = out_of_band(of_every_dtype(rows))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = pickle.loads(head, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert_same(back, of_every_dtype(rows))
    assert [column.dtype for column in tensor_columns(back.batch).values()] == DTYPES


def test_loading_shares_memory_and_a_writable_copy_shares_none():
    memory = bytearray(of_every_dtype(3000).batch["torch.float32"].numpy().tobytes())
    data = DataProto.from_dict({"a": torch.rand(3000, 2)}, {"n": np.zeros(3000)}, {"t": 1})
    head, buffers = out_of_band(data)
    back = pickle.loads(head, buffers=[memory, bytes(buffers[1].raw())])
    assert back.batch["a"][:3].tolist() == [[0, 1], [2, 3], [4, 5]]
    private = back.writable_copy()
    memory[:4] = np.float32(9).tobytes()
    assert back.batch["a"][0, 0] == 9
    assert private.batch["a"][0, 0] == 0
    private.batch["a"][...] = 1
    private.non_tensor_batch["n"][...] = 1
    assert back.batch["a"][0, 0] == 9
    with pytest.raises(ValueError, match="read-only"):
        back.non_tensor_batch["n"][0] = 1


@pytest.mark.parametrize(
    "column",
    [
        torch.arange(12).reshape(3, 4).T,
        torch.arange(12).reshape(4, 3)[:, 1:],
        torch.arange(3).expand(4, 3),
        torch.zeros(4, 0),
        torch.zeros(4, 1)[:, ::2],
        torch.zeros(4, 2, requires_grad=True),
        torch.nn.Parameter(torch.ones(4)),
    ],
)
def test_any_layout_of_a_tensor_survives_pickle_and_disk(column, tmp_path):
    data = DataProto.from_dict({"a": column}, {"n": np.arange(8).reshape(2, 4).T})
    for protocol in (4, 5):
        assert_same(pickle.loads(pickle.dumps(data, protocol=protocol)), data)
    data.save_to_disk(tmp_path / "batch")
    assert_same(DataProto.load_from_disk(tmp_path / "batch"), data)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("protocol", [4, 5])
def test_padding_is_not_stored_and_is_restored_bit_for_bit(dtype, protocol, tmp_path):
    rows = [(torch.randn(row % 40 + 1) * 100).to(dtype) for row in range(64)]
    names = {
        f"{at_end}": RaggedTensor.from_rows(rows, 4096, at_end=at_end) for at_end in (False, True)
    }
    data = DataProto.from_dict(names)
    content = pickle.dumps(data, protocol=protocol)
    tokens = sum(row.nbytes for row in rows)
    assert len(content) < 2 * tokens + 4 * 64 * 8 + 1000  # the lengths travel once
    assert_same(pickle.loads(content), data)
    data.save_to_disk(tmp_path / "batch")
    assert_same(DataProto.load_from_disk(tmp_path / "batch"), data)


def test_objects_meta_and_shard_survive_a_pickle():
    data = DataProto.from_dict(
        None, {"o": [{"x": (1, {2})}, torch.ones(2)]}, {"m": torch.zeros(1), "d": {"k": [None]}}
    )
    data.shard = Shard(0, 2, 0, 1, 3)
    back = pickle.loads(pickle.dumps(data))
    assert_same(back, data)
    assert back.shard == data.shard
    assert back.batch is None


def test_rows_without_columns_survive_a_pickle():
    data = DataProto(TensorDict({}, batch_size=[7]))
    assert len(pickle.loads(pickle.dumps(data))) == 7
