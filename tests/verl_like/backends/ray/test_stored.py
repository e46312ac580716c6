"""A batch that several calls read is in Ray's store once, while one of them is running."""

from __future__ import annotations

import pickle

import pytest
import ray
import torch

from tests.verl_like.groups import start
from tests.verl_like.sample_workers import Modes
from verl_like import DataProto
from verl_like.backends.ray.transport import RayTransport, StoredBatch, pickled_batch, put_once
from verl_like.batch.ragged import RaggedTensor

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


def batch(rows: int = 50_000, **meta: object) -> DataProto:
    columns = {"x": torch.arange(rows)}
    return DataProto.from_dict(columns, {"uid": [f"{row}" for row in range(rows)]}, meta)


def put_batch(data: DataProto) -> StoredBatch:
    packed = pickled_batch(data)
    assert packed is not None
    return put_once(packed)


def test_an_equal_batch_is_put_only_once_while_it_is_referenced() -> None:
    first, second = put_batch(batch(4)), put_batch(batch(4))
    assert second.reference == first.reference
    assert torch.equal(ray.get(second.reference).batch["x"], torch.arange(4))
    gone = first.reference.hex()
    del first, second
    assert put_batch(batch(4)).reference.hex() != gone


def test_any_difference_makes_another_batch() -> None:
    first, changed, renamed = put_batch(batch(4)), batch(4), batch(4)
    changed.batch["x"].numpy()[3] = 7  # nothing of torch sees this
    renamed.non_tensor_batch["uid"][0] = "other"
    for other in (changed, renamed, batch(4, temperature=0.5), batch(5)):
        assert put_batch(other).reference != first.reference
    assert ray.get(put_batch(changed).reference).batch["x"].tolist() == [0, 1, 2, 7]


def test_a_batch_that_is_small_without_padding_is_sent_with_the_call() -> None:
    rows = [torch.arange(30) for _ in range(200)]
    ragged = DataProto.from_dict({"tokens": RaggedTensor.from_rows(rows, width=256, at_end=True)})
    whole = DataProto.from_dict({"tokens": torch.randint(9, (200, 256))})
    part, keeper = RayTransport.share(ragged)
    assert keeper is None
    sent = pickle.loads(pickle.dumps(part, protocol=5)).padded("tokens")
    assert torch.equal(sent, ragged.padded("tokens"))
    part, keeper = RayTransport.share(whole)
    assert keeper is not None
    assert torch.equal(ray.get(part).batch["tokens"], whole.batch["tokens"])


def test_other_and_incomparable_values_are_put_unchanged() -> None:
    assert ray.get(RayTransport.share("text")[0]) == "text"
    lambda_batch = DataProto.from_dict({"x": torch.arange(2)}, meta_info={"key": lambda: 3})
    assert ray.get(RayTransport.share(lambda_batch)[0]).meta_info["key"]() == 3


def test_two_calls_on_a_batch_put_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    puts = []
    put = ray.put
    monkeypatch.setattr(ray, "put", lambda value: puts.append(value) or put(value))
    with start("ray", {"modes": (Modes, ())}, [1]) as group:
        data = batch()
        calls = [group.same.remote(data), group.same.remote(data)]
        assert len(puts) == 1
        for call in calls:
            assert torch.equal(call.get().batch["x"], data.batch["x"])
        group.same.remote(data).get()
        assert len(puts) == 2, "the calls before have ended, so nobody held it"


@pytest.mark.parametrize(("rows", "num_puts"), [(60_000, 1), (60_001, 2)])
def test_the_ranks_of_a_node_take_their_rows_of_one_stored_batch(
    rows: int, num_puts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    puts = []
    put = ray.put
    monkeypatch.setattr(ray, "put", lambda value: puts.append(value) or put(value))
    with start("ray", {"modes": (Modes, ())}, [3]) as group:
        data = batch(rows)
        same = group.same.remote(data).get()
    assert len(puts) == num_puts, "a chunk with pad rows is put alone"
    assert torch.equal(same.batch["x"], data.batch["x"])
    assert same.non_tensor_batch["uid"].tolist() == data.non_tensor_batch["uid"].tolist()
