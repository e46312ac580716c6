"""A batch in a pickle: what travels out of band, and what is copied."""

import pickle
import warnings
from collections import OrderedDict

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.verl_like.batches import DTYPES, assert_same, of_every_dtype
from verl_like.batch import runs
from verl_like.batch.columns import tensors_of
from verl_like.batch.protocol import DataProto, Shard


def out_of_band(data):
    buffers = []
    head = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    return head, buffers


def test_tensors_and_numeric_arrays_leave_the_pickle():
    data = DataProto.from_dict(
        {"a": torch.rand(1000, 100), "b": torch.zeros(1000).bfloat16()},
        {"n": np.zeros(1000), "uid": ["x"] * 1000},
    )
    head, buffers = out_of_band(data)
    assert sorted(buffer.raw().nbytes for buffer in buffers) == [2000, 8000, 400_000]
    assert len(head) < 10_000
    assert_same(pickle.loads(head, buffers=buffers), data)


@pytest.mark.parametrize("rows", [0, 1, 3, 3000])
def test_every_dtype_survives_read_only_buffers_without_a_warning(rows):
    head, buffers = out_of_band(of_every_dtype(rows))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = pickle.loads(head, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert_same(back, of_every_dtype(rows))
    assert [column.dtype for column in tensors_of(back.batch).values()] == DTYPES


def test_loading_copies_nothing_large_and_a_writable_copy_copies_everything():
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
def test_any_layout_of_tensor_travels(column, tmp_path):
    data = DataProto.from_dict({"a": column}, {"n": np.arange(8).reshape(2, 4).T})
    for protocol in (4, 5):
        assert_same(pickle.loads(pickle.dumps(data, protocol=protocol)), data)
    data.save_to_disk(tmp_path / "batch")
    assert_same(DataProto.load_from_disk(tmp_path / "batch"), data)


def padded(dtype: torch.dtype, width: int = 256) -> torch.Tensor:
    """Rows of 1 to 40 entries, and padding to that width."""
    rows = torch.zeros(64, width)
    for row in range(64):
        rows[row, : row % 40 + 1] = torch.randn(row % 40 + 1) * 100
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("protocol", [4, 5])
def test_padding_does_not_travel_and_comes_back_bit_for_bit(dtype, protocol):
    column = padded(dtype)
    data = DataProto.from_dict({"a": column})
    content = pickle.dumps(data, protocol=protocol)
    assert len(content) < column.nbytes / 2
    assert_same(pickle.loads(content), data)


def test_a_column_that_hardly_repeats_itself_or_is_large_is_shared_as_it_is():
    few_runs, many_runs = padded(torch.float32, width=1 << 12), torch.rand(64, 256)
    for column in (few_runs, many_runs):
        _, buffers = out_of_band(DataProto.from_dict({"a": column}))
        assert [buffer.raw().nbytes for buffer in buffers] == [column.nbytes]


@pytest.mark.parametrize("first", [0, 7, -(2**63), 2**63 - 100])
def test_positions_travel_as_their_steps(first):
    column = torch.arange(256).repeat(64, 1) + first  # past the largest number it goes on below
    data = DataProto.from_dict({"position_ids": column})
    content = pickle.dumps(data)
    assert len(content) < column.nbytes / 20
    assert_same(pickle.loads(content), data)


@pytest.mark.parametrize("largest", [2**15 - 1, 2**15, 2**31 - 1, 2**31, 2**63 - 1])
def test_whole_numbers_travel_narrow_and_keep_their_value(largest):
    column = torch.zeros(8, 200, dtype=torch.int64)
    column[3, 7:90], column[4, 5] = largest, -largest - 1
    data = DataProto.from_dict({"a": column})
    assert_same(pickle.loads(pickle.dumps(data)), data)


def test_runs_are_found_once_for_equal_content(monkeypatch):
    found = []
    own = runs._find_runs
    monkeypatch.setattr(runs, "_kept", OrderedDict())
    monkeypatch.setattr(runs, "_find_runs", lambda flat: (found.append(len(flat)), own(flat))[1])
    column = padded(torch.int64)
    data, same = DataProto.from_dict({"a": column}), DataProto.from_dict({"b": column.clone()})
    assert_same(pickle.loads(pickle.dumps(data)), data)
    assert_same(pickle.loads(pickle.dumps(same)), same)
    assert len(found) == 1

    column.numpy()[-1, -1] += 1  # torch does not know of it
    assert_same(pickle.loads(pickle.dumps(data)), data)
    assert len(found) == 2
    narrow = DataProto.from_dict({"a": column.view(torch.int32)})  # the same bytes
    assert_same(pickle.loads(pickle.dumps(narrow)), narrow)

    for number in range(2 * runs.KEPT):
        pickle.dumps(DataProto.from_dict({"a": column + number}))
    assert len(runs._kept) == runs.KEPT


def test_bits_of_nan_and_of_minus_zero_survive_the_runs():
    bits = torch.zeros(8, 200, dtype=torch.int32)
    bits[2, 5:50], bits[3, :9], bits[4, 0] = 0x7FC00001, 0x7F800002, -(2**31)
    back = pickle.loads(pickle.dumps(DataProto.from_dict({"a": bits.view(torch.float32)})))
    assert torch.equal(back.batch["a"].view(torch.int32), bits)
    back.batch["a"][0] = 1.0  # memory of its own


def test_objects_meta_and_shard_travel_by_pickle():
    data = DataProto.from_dict(
        None, {"o": [{"x": (1, {2})}, torch.ones(2)]}, {"m": torch.zeros(1), "d": {"k": [None]}}
    )
    data.shard = Shard(0, 2, 0, 1, 3)
    back = pickle.loads(pickle.dumps(data))
    assert_same(back, data)
    assert back.shard == data.shard
    assert back.batch is None


def test_rows_without_columns_travel():
    data = DataProto(TensorDict({}, batch_size=[7]))
    assert len(pickle.loads(pickle.dumps(data))) == 7
