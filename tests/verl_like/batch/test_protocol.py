"""DataProto: what each method returns, what it leaves alone, and what it says about bad input."""

import copy
import pickle

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from tests.verl_like.batches import assert_same, make, uids
from verl_like.batch.functions import (
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from verl_like.batch.protocol import DataProto, DataProtoItem, Shard
from verl_like.errors import BatchError


def test_length_comes_from_tensors_then_arrays_then_is_zero():
    assert len(make(3)) == 3
    assert len(DataProto.from_dict(non_tensors={"uid": ["a", "b"]})) == 2
    assert len(DataProto(TensorDict({}, batch_size=[5]))) == 5
    assert len(DataProto()) == 0


def test_an_int_gives_one_row():
    item = make(4, t=1)[-1]
    assert isinstance(item, DataProtoItem)
    assert item.batch["ids"].tolist() == [6, 7]
    assert item.non_tensor_batch == {"uid": "3-0", "weight": 3.0}
    assert item.meta_info == {"t": 1}


def test_a_batch_iterates_over_its_rows():
    assert [item.non_tensor_batch["uid"] for item in make(3)] == ["0-0", "1-0", "2-0"]


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (slice(1, 3), [1, 2]),
        (slice(None, None, -1), [3, 2, 1, 0]),
        (slice(None, None, 3), [0, 3]),
        (slice(7, 9), []),
        ([2, -1, 2], [2, 3, 2]),
        ([], []),
        ([True, False, False, True], [0, 3]),
        (np.array([3, 0], dtype=np.uint8), [3, 0]),
        (np.array([False, True, True, False]), [1, 2]),
        (torch.tensor([1, 1], dtype=torch.int32), [1, 1]),
        (torch.tensor([True, True, False, False]), [0, 1]),
    ],
)
def test_an_index_picks_the_same_rows_of_every_column(index, rows):
    picked = make(4, t=1)[index]
    assert picked.batch["score"].tolist() == rows
    assert uids(picked) == [f"{row}-0" for row in rows]
    assert picked.non_tensor_batch["weight"].dtype == np.float64
    assert picked.meta_info == {"t": 1}


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ([0, 4], r"Row 4 \(entry 1 of the index\)"),
        ([-5], "Row -5"),
        ([True, False], "2 entries for 4 rows"),
        ([0.5], "float64"),
        (torch.zeros(2, 2, dtype=torch.int64), "one dim"),
        (torch.tensor(1), "one dim"),
    ],
)
def test_an_index_that_fits_no_rows_says_why(index, said):
    with pytest.raises(BatchError, match=said):
        make(4)[index]


def test_other_index_types_are_type_errors():
    for index in ("uid", True, 1.0, (1, 2)):
        with pytest.raises(TypeError, match=type(index).__name__):
            make(4)[index]
    with pytest.raises(IndexError, match="4 rows"):
        make(4)[4]


def test_columns_of_different_lengths_are_named_with_their_lengths():
    with pytest.raises(BatchError, match="'a' has 2, 'b' has 3"):
        DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(BatchError, match="'a' has 2, 'uid' has 1"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"uid": ["x"]})
    with pytest.raises(BatchError, match="has 2, 'uid' has 1"):
        DataProto(TensorDict({"a": torch.zeros(2)}, batch_size=[2]), {"uid": np.array(["x"])})


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: DataProto.from_dict({"a": [1, 2]}), "'a' is of type list"),
        (lambda: DataProto.from_dict({"a": torch.tensor(1.0)}), "'a' is without rows"),
        (lambda: DataProto.from_dict({"a": torch.eye(2).to_sparse()}), "'a' is of layout"),
        (lambda: DataProto.from_dict(non_tensors={"a": "xy"}), "'a' is of type str"),
        (
            lambda: DataProto.from_dict(non_tensors={"a": np.array(1)}),
            "'a' is an array without rows",
        ),
        (lambda: DataProto.from_dict(non_tensors={1: ["x"]}), "column 1 is not"),
        (
            lambda: DataProto.from_dict({"a": torch.zeros(2, 2)}, num_batch_dims=2),
            "one batch dim, not 2",
        ),
        (lambda: DataProto.from_single_dict({"a": [1]}), "'a' is a list"),
        (lambda: DataProto({"a": torch.zeros(2)}), "batch is a dict"),
        (lambda: DataProto(TensorDict({}, batch_size=[2, 3])), r"\(2, 3\)"),
        (lambda: DataProto.from_tensordict(TensorDict({}, batch_size=[])), r"\(\)"),
    ],
)
def test_what_is_no_column_is_refused_by_name(build, said):
    with pytest.raises(BatchError, match=said):
        build()


def test_from_single_dict_sorts_by_type():
    data = DataProto.from_single_dict({"a": torch.zeros(2), "b": np.array([1, 2])}, {"t": 1})
    assert list(data.batch.keys()) == ["a"]
    assert list(data.non_tensor_batch) == ["b"]
    assert data.meta_info == {"t": 1}


def test_a_tensordict_and_back_keeps_rows_of_objects_and_meta():
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


def test_a_tensordict_needs_different_names():
    for clashing in (
        DataProto.from_dict({"a": torch.zeros(1)}, {"a": ["x"]}),
        DataProto.from_dict({"a": torch.zeros(1)}, meta_info={"a": 1}),
    ):
        with pytest.raises(BatchError, match="'a' is a"):
            clashing.to_tensordict()


@pytest.mark.parametrize(
    ("rows", "chunks", "sizes"),
    [(6, 3, [2, 2, 2]), (5, 4, [2, 1, 1, 1]), (1, 3, [1, 0, 0]), (0, 2, [0, 0])],
)
def test_chunk_is_balanced(rows, chunks, sizes):
    assert [len(part) for part in make(rows).chunk(chunks)] == sizes


def test_split_leaves_a_short_last_part():
    assert [len(part) for part in make(5).split(2)] == [2, 2, 1]
    assert make(0).split(2) == []


@pytest.mark.parametrize("count", [0, -1])
def test_counts_below_one_are_refused(count):
    for call in (make(2).chunk, make(2).split, make(2).unfold_column_chunks):
        with pytest.raises(BatchError, match=f"not {count}"):
            call(count)
    with pytest.raises(BatchError, match=f"not {count}"):
        pad_dataproto_to_divisor(make(2), count)


def test_repeat_interleaves_or_tiles():
    assert make(2, t=1).repeat(2).batch["score"].tolist() == [0, 0, 1, 1]
    assert uids(make(2).repeat(2, interleave=False)) == ["0-0", "1-0", "0-0", "1-0"]
    assert make(2).repeat(3, interleave=False).batch["ids"].shape == (6, 2)
    assert make(2, t=1).repeat(2).meta_info == {"t": 1}
    for interleave in (True, False):
        assert_same(make(2).repeat(1, interleave), make(2))
        assert len(make(2).repeat(0, interleave)) == 0
    with pytest.raises(BatchError, match="not -1"):
        make(2).repeat(-1)


@pytest.mark.parametrize(
    "counts", [[2, 0, 1], (2, 0, 1), np.array([2, 0, 1]), torch.tensor([2, 0, 1])]
)
def test_sample_level_repeat_counts_per_row(counts):
    assert uids(make(3).sample_level_repeat(counts)) == ["0-0", "0-0", "2-0"]


@pytest.mark.parametrize("counts", [[1, 2], [1, -1, 1], [0.5, 1, 1], 2])
def test_sample_level_repeat_needs_a_count_per_row(counts):
    with pytest.raises(BatchError, match="each of the 3 rows"):
        make(3).sample_level_repeat(counts)


def test_unfold_column_chunks_turns_dim_1_into_rows():
    data = make(2).unfold_column_chunks(2, ["ids"])
    assert data.batch["ids"].tolist() == [[0], [1], [2], [3]]
    assert uids(data) == ["0-0", "0-0", "1-0", "1-0"]
    assert data.batch["score"].tolist() == [0, 0, 1, 1]
    with pytest.raises(BatchError, match=r"'ids' \(shape \(2, 2\)\)"):
        make(2).unfold_column_chunks(3, ["ids"])


def test_reorder_wants_a_permutation():
    assert uids(make(3).reorder([2, 0, 1])) == ["2-0", "0-0", "1-0"]
    with pytest.raises(BatchError, match="each of the 3 rows once"):
        make(3).reorder([0, 0, 1])


def test_make_iterator_covers_every_row_each_epoch_and_repeats_by_seed():
    data = make(6, t=1)
    shuffled = [
        uids(b)
        for b in data.make_iterator(2, epochs=2, seed=3, dataloader_kwargs={"shuffle": True})
    ]
    again = [
        uids(b)
        for b in data.make_iterator(2, epochs=2, seed=3, dataloader_kwargs={"shuffle": True})
    ]
    assert shuffled == again
    assert len(shuffled) == 6
    for epoch in (shuffled[:3], shuffled[3:]):
        assert sorted(sum(epoch, [])) == uids(data)
    assert shuffled[:3] != shuffled[3:]
    in_order = list(data.make_iterator(3, epochs=1))
    assert_same(DataProto.concat(in_order), data)
    assert in_order[0].non_tensor_batch["weight"].dtype == np.float64
    assert in_order[0].meta_info == {"t": 1}


def test_make_iterator_names_the_sizes_that_divide():
    with pytest.raises(BatchError, match=r"4 does not divide 6 rows; these do: \[1, 2, 3, 6\]"):
        make(6).make_iterator(4, epochs=1)


def test_padding_appends_copies_of_the_last_or_first_row():
    data = make(2)
    assert data.padding(2) is data
    assert uids(data) == ["0-0", "1-0", "1-0", "1-0"]
    assert uids(make(2).padding(1, "first")) == ["0-0", "1-0", "0-0"]
    assert len(make(0).padding(0)) == 0
    for rows, size, candidate in ((0, 1, ""), (2, -1, ""), (2, 1, "middle")):
        with pytest.raises(BatchError, match="padding"):
            make(rows).padding(size, candidate)


def test_padding_to_a_divisor_cycles_from_the_front_and_comes_off_again():
    data = make(3)
    padded, pad = pad_dataproto_to_divisor(data, 8)
    assert pad == 5
    assert padded.batch["score"].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    assert len(data) == 3
    assert_same(unpad_dataproto(padded, pad), data)
    assert pad_dataproto_to_divisor(make(0), 4)[1] == 0
    with pytest.raises(BatchError, match="4 rows off a batch of 3"):
        unpad_dataproto(data, 4)


def test_folding_a_batch_dim_and_back():
    data = make(6).select(non_tensor_batch_keys=["uid"])
    folded = fold_batch_dim(data, 3)
    assert folded.batch["ids"].shape == (3, 2, 2)
    assert folded.non_tensor_batch["uid"].shape == (3, 2)
    assert_same(unfold_batch_dim(folded), data)
    assert len(unfold_batch_dim(DataProto())) == 0
    with pytest.raises(BatchError, match="6 rows do not divide into 4"):
        fold_batch_dim(data, 4)
    with pytest.raises(BatchError, match="agree in their first 2 dims"):
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


def test_to_moves_in_place():
    data = make(2)
    assert data.to("cpu") is data
    assert data[:1].batch.device == torch.device("cpu")
    assert DataProto().to("cpu").batch is None


def test_shard_facts_mark_pad_rows_and_end_with_the_piece():
    piece = make(4)
    assert (piece.num_real_rows, piece.pad_mask.tolist()) == (4, [False] * 4)
    piece.shard = Shard(index=1, count=2, start=4, rows=3, total=7)
    assert (piece.num_real_rows, piece.pad_mask.tolist()) == (3, [False, False, False, True])
    kept = [
        copy.copy(piece),
        copy.deepcopy(piece),
        piece.writable_copy(),
        pickle.loads(pickle.dumps(piece)),
        piece.union(make(4)),
    ]
    assert all(data.shard == piece.shard for data in kept)
    derived = [
        piece[:2],
        piece[[0]],
        piece.select(),
        piece.repeat(1),
        DataProto.concat([piece]),
        piece.pop(["ids"]),
    ]
    assert all(data.shard is None for data in derived)
    assert piece.reorder([3, 2, 1, 0]).shard is None


def test_copies_share_as_much_as_they_say():
    data = DataProto.from_dict({"a": torch.zeros(1)}, {"o": [[1]]}, {"m": [1]})
    shared, deep = copy.copy(data), copy.deepcopy(data)
    shared.batch["new"] = torch.zeros(1)
    assert "new" not in data.batch.keys()
    deep.batch["a"][0], deep.non_tensor_batch["o"][0][0], deep.meta_info["m"][0] = 5, 5, 5
    assert (data.batch["a"].item(), data.non_tensor_batch["o"][0], data.meta_info) == (
        0,
        [1],
        {"m": [1]},
    )
    shared.batch["a"][0] = 7
    assert data.batch["a"].item() == 7


def test_the_texts_name_the_columns(capsys):
    data = make(2, t=1.0)
    assert repr(data) == "DataProto(2 rows; columns: ids, score, uid, weight; meta: t)"
    for line in ("ids: (2, 2) torch.int64 on cpu", "uid: (2,) object", "t: float"):
        assert line in data.get_data_info()
    data.print_size("before")
    assert capsys.readouterr().out.startswith("before, tensors 0.0000 GiB")
    assert data.is_padding_enabled()
