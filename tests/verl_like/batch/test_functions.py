"""verl's functions on batches: padding to a divisor, folding a batch dim, collating rows."""

import pytest

from tests.verl_like.batches import make, uids
from verl_like.batch.protocol import DataProto
from verl_like.batch.verl_compat import (
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from verl_like.errors import BatchError


def test_padding_to_a_divisor_cycles_from_the_front():
    data = make(3)
    padded, _ = pad_dataproto_to_divisor(data, 8)
    assert padded.batch["score"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    with pytest.raises(BatchError, match="4 rows from a batch of 3"):
        unpad_dataproto(data, 4)
    with pytest.raises(BatchError, match="not 0"):
        pad_dataproto_to_divisor(data, 0)


def test_folding_a_batch_dim():
    data = make(6).select(non_tensor_batch_keys=["uid"])
    folded = fold_batch_dim(data, 3)
    assert folded.batch["ids"].shape == (3, 2, 2)
    assert folded.non_tensor_batch["uid"].shape == (3, 2)
    assert len(unfold_batch_dim(DataProto())) == 0
    with pytest.raises(BatchError, match="6 rows do not divide into new_batch_size=4 equal groups"):
        fold_batch_dim(data, 4)
    with pytest.raises(BatchError, match="with the same first 2 dims"):
        unfold_batch_dim(data)


def test_collate_makes_a_batch_of_rows():
    data = make(4, t=1)
    back = collate_fn([data[1], data[3]])
    assert back.batch["ids"].tolist() == [[2, 3], [6, 7]]
    assert uids(back) == ["1-0", "3-0"]
    assert back.meta_info == {"t": 1}
    with pytest.raises(BatchError, match="no rows"):
        collate_fn([])
    with pytest.raises(BatchError, match="row 1 .*meta_info"):
        collate_fn([data[0], make(4, t=2)[0]])
