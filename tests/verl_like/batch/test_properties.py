"""Round trips that hold for any batch: concat and chunk, pad and unpad, reorder, pickle, disk."""

import copy
import pickle

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verl_like.batches import assert_same
from verl_like.batch.columns import same_value
from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import RaggedTensor

JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.just("!"), inner, max_size=3)
    ),
    max_leaves=4,
)
TORCH_DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
NUMPY_DTYPES = [
    "float32",
    "float64",
    "int64",
    "uint16",
    "bool",
    "complex64",
    "U3",
    "S2",
    "datetime64[s]",
]


def ragged(noise, rows):
    """Rows of 0 to 5 entries, anywhere in a width of 7."""
    lengths = torch.from_numpy(noise.integers(0, 6, rows))
    starts = torch.from_numpy(noise.integers(0, 8 - lengths.numpy()))
    dtype = TORCH_DTYPES[noise.integers(len(TORCH_DTYPES))]
    values = torch.from_numpy(noise.integers(0, 100, int(lengths.sum()))).to(dtype)
    return RaggedTensor(values, lengths, 7, starts, int(noise.integers(2)))


@st.composite
def batches(draw):
    """Any mix of tensor, numeric and object columns (or none), with meta."""
    rows = draw(st.integers(0, 6))
    noise = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    tensors = {}
    for i, dtype in enumerate(draw(st.lists(st.sampled_from(TORCH_DTYPES), max_size=3))):
        shape = (rows, *draw(st.lists(st.integers(0, 3), max_size=2)))
        values = torch.from_numpy(noise.integers(0, 100, shape)).to(dtype)
        if dtype.is_floating_point and draw(st.booleans()):
            values[values > 50] = float("nan")
        tensors[f"t{i}"] = values

    for i in range(draw(st.integers(0, 2))):
        tensors[f"r{i}"] = ragged(noise, rows)

    arrays = {}
    for i, name in enumerate(draw(st.lists(st.sampled_from(NUMPY_DTYPES), max_size=2))):
        shape = (rows, *draw(st.lists(st.integers(1, 2), max_size=1)))
        arrays[f"n{i}"] = noise.integers(0, 99, shape).astype(name)
    for i in range(draw(st.integers(0, 2))):
        arrays[f"o{i}"] = draw(st.lists(JSON_LIKE, min_size=rows, max_size=rows))

    meta = draw(st.dictionaries(st.sampled_from("xyz"), JSON_LIKE, max_size=2))
    return DataProto.from_dict(tensors, arrays, meta)


def rectangles(data):
    """Return the same batch after a read of its columns in verl's layout."""
    copied = copy.copy(data)
    assert copied.batch is None or set(copied.batch.keys()) == set(data.columns)
    assert not any(isinstance(column, RaggedTensor) for column in copied.columns.values())
    return copied


quick = settings(max_examples=25, deadline=None)


@quick
@given(batches(), st.integers(1, 12))
def test_concat_undoes_chunk(data, chunks):
    parts = data.chunk(chunks)
    assert len(parts) == chunks
    expected = np.array_split(np.arange(len(data)), chunks)
    assert [len(part) for part in parts] == [len(part) for part in expected]
    assert_same(DataProto.concat(parts), data)


@quick
@given(batches(), st.integers(1, 12))
def test_concat_undoes_split(data, size):
    parts = data.split(size)
    assert [len(part) for part in parts[:-1]] == [size] * max((len(data) - 1) // size, 0)
    if parts:
        assert_same(DataProto.concat(parts), data)


@quick
@given(batches(), st.randoms(use_true_random=False))
def test_the_inverse_order_undoes_reorder(data, random):
    order = list(range(len(data)))
    random.shuffle(order)
    before = copy.deepcopy(data)
    data.reorder(order)
    assert_same(data, before[order])
    assert_same(data.reorder(np.argsort(order)), before)


@quick
@given(batches(), st.integers(1, 4))
def test_repeat_is_a_pick_of_rows(data, times):
    rows = np.arange(len(data))
    assert_same(data.repeat(times), data[rows.repeat(times)])
    assert_same(data.repeat(times, interleave=False), data[np.tile(rows, times)])


@quick
@given(batches(), st.integers(1, 3), st.randoms(use_true_random=False))
def test_operations_on_ragged_columns_match_their_rectangles(data, times, random):
    order = list(range(len(data)))
    random.shuffle(order)
    operations = [
        lambda d: d[order],
        lambda d: d[1:3],
        lambda d: d.repeat(times),
        lambda d: DataProto.concat([d, d[order]]),
        lambda d: DataProto.concat([rectangles(d), d[order]]),
        lambda d: copy.deepcopy(d).union(rectangles(d)),
        lambda d: d.select(list(d.columns)),
        copy.deepcopy,
    ]
    for operation in operations:
        assert_same(rectangles(operation(data)), rectangles(operation(rectangles(data))))
    for column in data.columns.values():
        if isinstance(column, RaggedTensor) and column.fill == 0:
            assert same_value(column.like(column.padded()), column)
    if len(data) and data.columns:
        assert same_value(dict(data[-1].batch), dict(rectangles(data)[-1].batch))


@quick
@given(batches(), st.integers(0, 9), st.integers(0, 9))
def test_a_slice_is_a_pick_of_rows(data, start, stop):
    assert_same(data[start:stop], data[list(range(len(data))[start:stop])])


@quick
@given(batches())
def test_a_union_with_itself_changes_nothing(data):
    assert_same(copy.deepcopy(data).union(copy.deepcopy(data)), data)


@quick
@given(batches())
def test_pickle_keeps_everything(data):
    assert_same(pickle.loads(pickle.dumps(data, protocol=2)), data)
    buffers = []
    head = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    assert_same(pickle.loads(head, buffers=[bytes(buffer.raw()) for buffer in buffers]), data)


@quick
@given(data=batches())
def test_disk_keeps_everything(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("disk") / "batch.safetensors"
    data.save_to_disk(path)
    back = DataProto.load_from_disk(path)
    assert_same(back, data)
    lists = [[array.tolist() for array in d.non_tensor_batch.values()] for d in (back, data)]
    assert repr(lists[0]) == repr(lists[1])
    assert repr(back.meta_info) == repr(data.meta_info)
