"""A batch in a file is read back exactly, and an inconsistent file is rejected."""

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from tests.verl_like.batches import assert_same, of_every_dtype
from verl_like.batch.protocol import DataProto
from verl_like.errors import BatchError


def test_a_file_keeps_types_exactly(tmp_path):
    data = of_every_dtype()
    objects = [
        [1, -(2**70), 1.5, float("inf"), True, None, "ü\ud800"],
        {"a": (1, [2, ()]), "!": "tuple", "nested": {"!": {"value": 1}}},
        (np.float32(0.1), np.int64(3), np.bool_(True), np.str_("x"), -0.0),
    ]
    data.union(
        DataProto.from_dict(
            None,
            {
                "o": objects,
                "grid": np.array([[1, "a"], [None, 2.5], [[], {}]], dtype=object),
                "text": np.array(["a", "bcd", ""]),
                "when": np.array(["2024-01-01", "NaT", "2025-01-01"], dtype="datetime64[s]"),
                "big": np.arange(3, dtype=">i4"),
            },
            {"eos": (1, 2), "m": {"loss": np.float64(1.25)}, "none": None},
        )
    )
    data.save_to_disk(tmp_path / "batch.safetensors")
    back = DataProto.load_from_disk(str(tmp_path / "batch.safetensors"))
    assert_same(back, data)
    assert list(back.batch.keys()) == list(data.batch.keys())
    assert list(back.non_tensor_batch) == list(data.non_tensor_batch)
    assert repr(back.non_tensor_batch["o"].tolist()) == repr(objects)
    assert type(back.meta_info["m"]["loss"]) is np.float64
    back.batch["torch.float32"][...] = 9
    back.non_tensor_batch["n"][...] = 9
    assert_same(DataProto.load_from_disk(tmp_path / "batch.safetensors"), data)


@pytest.mark.parametrize(
    "data",
    [
        DataProto(),
        DataProto(meta_info={"t": 1}),
        DataProto(TensorDict({}, batch_size=[7])),
        DataProto.from_dict(
            non_tensors={"o": [], "n": np.zeros((0, 3)), "s": np.array([], dtype="U4")}
        ),
        of_every_dtype(0),
    ],
)
def test_empty_batches_survive_a_file(data, tmp_path):
    data.save_to_disk(tmp_path / "batch")
    back = DataProto.load_from_disk(tmp_path / "batch")
    assert_same(back, data)
    assert (back.batch is None) == (data.batch is None)


def test_columns_that_share_memory_survive_a_file(tmp_path):
    shared = torch.arange(8).reshape(4, 2)
    data = DataProto.from_dict({"a": shared, "b": shared, "c": shared[:, 0]})
    data.save_to_disk(tmp_path / "batch")
    assert_same(DataProto.load_from_disk(tmp_path / "batch"), data)


class Opaque:
    """An object that JSON cannot encode."""


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Opaque(), "Opaque"),
        ({1: 2}, "keys that are not strings"),
        ([{"x": b"y"}], "bytes"),
        (1 << 5000, "int"),
    ],
)
def test_an_object_that_json_cannot_encode_is_rejected_with_its_place(value, reason, tmp_path):
    with pytest.raises(BatchError, match=f"'extra', row 1: .*{reason}"):
        DataProto.from_dict(None, {"extra": ["fine", value]}).save_to_disk(tmp_path / "batch")
    with pytest.raises(BatchError, match=rf"meta_info\['key'\]: .*{reason}"):
        DataProto(meta_info={"key": value}).save_to_disk(tmp_path / "batch")
    assert os.listdir(tmp_path) == []


def test_an_object_has_at_most_a_hundred_levels(tmp_path):
    deep = 1
    for _ in range(50):
        deep = [{"below": deep}]
    data = DataProto(meta_info={"deep": deep})
    data.save_to_disk(tmp_path / "batch")
    assert DataProto.load_from_disk(tmp_path / "batch").meta_info == {"deep": deep}
    with pytest.raises(BatchError, match=r"meta_info\['deep'\].* in 100 others"):
        DataProto(meta_info={"deep": [deep]}).save_to_disk(tmp_path / "batch")


def test_an_object_that_contains_itself_is_rejected(tmp_path):
    loop = []
    loop.append(loop)
    with pytest.raises(BatchError, match="'extra', row 0"):
        DataProto.from_dict(None, {"extra": [loop]}).save_to_disk(tmp_path / "batch")


def test_dtypes_that_a_file_cannot_store_are_rejected_by_name(tmp_path):
    records = DataProto(non_tensor_batch={"pairs": np.zeros(2, dtype="i4,f8")})
    with pytest.raises(BatchError, match="'pairs' has dtype"):
        records.save_to_disk(tmp_path / "batch")
    wide = DataProto.from_dict({"c": torch.zeros(1, dtype=torch.complex128)})
    with pytest.raises(BatchError, match="'c'.*complex128"):
        wide.save_to_disk(tmp_path / "batch")
    assert os.listdir(tmp_path) == []


def test_a_failed_save_keeps_the_old_file(tmp_path):
    path = tmp_path / "batch"
    of_every_dtype().save_to_disk(path)
    with pytest.raises(BatchError):
        DataProto(meta_info={"key": Opaque()}).save_to_disk(path)
    assert_same(DataProto.load_from_disk(path), of_every_dtype())


@pytest.mark.parametrize("size", [0, 3, 7, 100, 0.5, 0.9, -1])
def test_a_truncated_file_is_rejected(size, tmp_path):
    of_every_dtype().save_to_disk(tmp_path / "batch")
    content = (tmp_path / "batch").read_bytes()
    num_bytes = int(size * len(content)) if isinstance(size, float) else size
    (tmp_path / "batch").write_bytes(content[:num_bytes])
    with pytest.raises(BatchError, match="is damaged"):
        DataProto.load_from_disk(tmp_path / "batch")


OBJECTS = {"name": "o", "shape": [3], "dtype": "|O"}


@pytest.mark.parametrize(
    "change",
    [
        {"rows": 2},
        {"rows": -1},
        {"rows": "x"},
        {"tensors": ["missing"]},
        {"tensors": 5},
        {"arrays": [{"name": "n", "shape": [-1], "dtype": "<i2"}]},
        {"arrays": [{"name": "n", "shape": [10**12], "dtype": "<i2"}]},
        {"arrays": [{"name": "n", "shape": [3], "dtype": "i4,O"}]},
        {"arrays": [{"name": "n", "shape": [3], "dtype": "nonsense"}]},
        {"arrays": [{"name": "n", "shape": [], "dtype": "<i2"}]},
        {"arrays": [{"name": "n", "shape": [3], "dtype": "|O", "rows": [1, 2]}]},
        {"arrays": [{"name": "o", "shape": [2], "dtype": "|O", "rows": [1, 2]}]},
        {"arrays": [{"name": 1, "shape": [3], "dtype": "|O", "rows": [1, 2, 3]}]},
        {"arrays": [OBJECTS | {"rows": [{"!": "eval", "value": "1"}, 2, 3]}]},
        {"arrays": [OBJECTS | {"rows": [{"!": ["list"], "value": "1"}, 2, 3]}]},
        {"arrays": {}, "meta_info": []},
        {"meta_info": {"x": {"!": "int8", "value": [1]}}, "rows": 4},
    ],
)
def test_an_inconsistent_document_is_rejected(change, tmp_path):
    path = tmp_path / "batch"
    of_every_dtype().save_to_disk(path)
    stored = load_file(path)
    document = json.loads(stored["document"].numpy().tobytes()) | change
    stored["document"] = torch.frombuffer(
        bytearray(json.dumps(document).encode()), dtype=torch.uint8
    )
    save_file(stored, path, {"format": "verl_like.DataProto", "version": "1"})
    with pytest.raises(BatchError, match="is damaged"):
        DataProto.load_from_disk(path)


def test_other_safetensors_and_deep_json_are_rejected(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "other")
    deep = torch.frombuffer(bytearray(b"[" * 100_000), dtype=torch.uint8)
    save_file(
        {"document": deep}, tmp_path / "deep", {"format": "verl_like.DataProto", "version": "1"}
    )
    for name in ("other", "deep"):
        with pytest.raises(BatchError, match="not a batch file"):
            DataProto.load_from_disk(tmp_path / name)
