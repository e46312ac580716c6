"""A TensorDict as rows, converted back with nested columns."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl_like.batch.split import TensorDictRows, join_chunks, split_rows
from verl_like.errors import BatchError

LENGTHS = [3, 1, 4, 2, 5]


def make() -> TensorDict:
    """Return five rows with a column of every kind."""
    jagged = torch.nested.as_nested_tensor(
        [torch.arange(n) + 10 * n for n in LENGTHS], layout=torch.jagged
    )
    positions = torch.nested.as_nested_tensor(
        [torch.arange(n).expand(2, n).contiguous() for n in LENGTHS], layout=torch.jagged
    )
    logits = torch.nested.as_nested_tensor(
        [torch.ones(n, 2) * n for n in LENGTHS], layout=torch.jagged
    )
    columns = {"x": torch.arange(5), "ids": jagged, "positions": positions, "logits": logits}
    uid = NonTensorStack(*map(NonTensorData, "abcde"))
    turns = NonTensorStack(*(NonTensorData([0.5] * n) for n in range(5)))
    others = {"uid": uid, "turns": turns, "top_p": NonTensorData(0.7, batch_size=[5])}
    return TensorDict({**columns, **others}, batch_size=[5])


def assert_equal(one: TensorDict, other: TensorDict) -> None:
    assert set(one.keys()) == set(other.keys())
    for name, column in one.items():
        if isinstance(column, torch.Tensor) and column.is_nested:
            assert column.layout == other[name].layout
            for row, same in zip(column.unbind(), other[name].unbind(), strict=True):
                assert row.tolist() == same.tolist()
        elif isinstance(column, torch.Tensor):
            assert column.tolist() == other[name].tolist()
        else:
            assert one[name] == other[name]


def test_every_kind_of_column_survives_a_pickle() -> None:
    buffers: list[pickle.PickleBuffer] = []
    rows = TensorDictRows.of(make())
    pickled = pickle.dumps(rows, protocol=5, buffer_callback=buffers.append)
    assert_equal(pickle.loads(pickled, buffers=buffers).to_tensordict(), make())
    assert_equal(pickle.loads(pickle.dumps(rows)).to_tensordict(), make())


def test_chunks_are_padded_and_can_be_joined() -> None:
    chunks = split_rows(TensorDictRows.of(make()), 2)
    last = chunks[1].to_tensordict()
    assert last.batch_size == (3,)
    assert last["uid"] == ["d", "e", "a"]
    assert [len(row) for row in last["ids"].unbind()] == [2, 5, 3]
    assert last["positions"].shape[:2] == (3, 2)
    assert last.shard.rows == 2

    real = chunks[1].slice(0, 2)
    joined = join_chunks([chunks[0], real])
    assert_equal(joined.to_tensordict(), make())


def test_a_copy_shares_no_nested_memory() -> None:
    whole = make()
    copied = TensorDictRows.of(whole).writable_copy()
    whole["ids"].values().zero_()
    assert_equal(copied.to_tensordict(), make())


def test_joined_chunks_have_the_entries_of_the_first() -> None:
    one, other = (TensorDict({"m": NonTensorData(n)}, batch_size=[]) for n in (1, 2))
    joined = join_chunks([TensorDictRows.of(one), TensorDictRows.of(other)])
    assert joined.to_tensordict()["m"] == 1
    assert joined.to_tensordict().batch_size == ()


def test_a_tensor_needs_rows() -> None:
    with pytest.raises(BatchError, match=r"without a batch dim holds only NonTensorData.*'x'"):
        TensorDictRows.of(TensorDict({"x": torch.ones(2)}, batch_size=[]))


def test_strided_nested_tensors_are_rejected_with_an_alternative() -> None:
    strided = torch.nested.nested_tensor([torch.ones(n, n + 1) for n in LENGTHS])
    with pytest.raises(BatchError, match=r"'images' is a nested.*layout=torch.jagged"):
        TensorDictRows.of(TensorDict({"images": strided}, batch_size=[5]))
