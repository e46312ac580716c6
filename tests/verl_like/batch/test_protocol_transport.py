"""DataProto across a pickle and through a file: what travels, what is copied, what is refused."""

import json
import os
import pickle
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from verl_like.batch.columns import tensors_of
from verl_like.batch.merge import same_value
from verl_like.batch.protocol import DataProto, Shard
from verl_like.errors import BatchError

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.bool,
    torch.uint16,
    torch.float8_e4m3fn,
]


def assert_same(left, right):
    assert same_value(tensors_of(left.batch), tensors_of(right.batch))
    assert len(left) == len(right)
    assert {k: (a.dtype, a.shape) for k, a in left.non_tensor_batch.items()} == {
        k: (a.dtype, a.shape) for k, a in right.non_tensor_batch.items()
    }
    assert same_value(left.non_tensor_batch, right.non_tensor_batch)
    assert same_value(left.meta_info, right.meta_info)


def of_every_dtype(rows=3):
    return DataProto.from_dict(
        {str(dtype): torch.arange(rows * 2).reshape(rows, 2).to(dtype) for dtype in DTYPES},
        {"n": np.arange(rows, dtype=np.int16), "uid": [f"{row}" for row in range(rows)]},
        {"t": 0.5},
    )


def out_of_band(data):
    buffers = []
    head = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    return head, buffers


def test_tensors_and_numeric_arrays_leave_the_pickle():
    data = DataProto.from_dict(
        {"a": torch.zeros(1000, 100), "b": torch.zeros(1000).bfloat16()},
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
    data = DataProto.from_dict({"a": torch.zeros(3000, 2)}, {"n": np.zeros(3000)}, {"t": 1})
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
    for back in (
        pickle.loads(pickle.dumps(data, protocol=5)),
        pickle.loads(pickle.dumps(data, protocol=4)),
    ):
        assert_same(back, data)
    data.save_to_disk(tmp_path / "batch")
    assert_same(DataProto.load_from_disk(tmp_path / "batch"), data)


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


def test_a_file_brings_back_types_exactly(tmp_path):
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


def test_two_columns_over_one_memory_survive_a_file(tmp_path):
    shared = torch.arange(8).reshape(4, 2)
    data = DataProto.from_dict({"a": shared, "b": shared, "c": shared[:, 0]})
    data.save_to_disk(tmp_path / "batch")
    assert_same(DataProto.load_from_disk(tmp_path / "batch"), data)


class Opaque:
    """Something JSON knows nothing of."""


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Opaque(), "Opaque"),
        ({1, 2}, "set"),
        (torch.zeros(1), "Tensor"),
        ({1: 2}, "keys that are not strings"),
        ([{"x": b"y"}], "bytes"),
        (1 << 5000, "int"),
    ],
)
def test_an_object_that_json_cannot_hold_is_refused_by_column_and_row(value, named, tmp_path):
    with pytest.raises(BatchError, match=f"'extra', row 1: .*{named}"):
        DataProto.from_dict(None, {"extra": ["fine", value]}).save_to_disk(tmp_path / "batch")
    with pytest.raises(BatchError, match=rf"meta_info\['key'\]: .*{named}"):
        DataProto(meta_info={"key": value}).save_to_disk(tmp_path / "batch")
    assert os.listdir(tmp_path) == []


def test_what_refers_to_itself_is_refused(tmp_path):
    loop = []
    loop.append(loop)
    with pytest.raises(BatchError, match="'extra', row 0"):
        DataProto.from_dict(None, {"extra": [loop]}).save_to_disk(tmp_path / "batch")


def test_dtypes_that_a_file_cannot_hold_are_refused_by_name(tmp_path):
    with pytest.raises(BatchError, match="'pairs' has dtype"):
        DataProto(non_tensor_batch={"pairs": np.zeros(2, dtype="i4,f8")}).save_to_disk(
            tmp_path / "batch"
        )
    with pytest.raises(BatchError, match="'c'.*complex128"):
        DataProto.from_dict({"c": torch.zeros(1, dtype=torch.complex128)}).save_to_disk(
            tmp_path / "batch"
        )
    assert os.listdir(tmp_path) == []


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "batch"
    of_every_dtype().save_to_disk(path)
    with pytest.raises(BatchError):
        DataProto(meta_info={"key": Opaque()}).save_to_disk(path)
    assert_same(DataProto.load_from_disk(path), of_every_dtype())


class RunsCode:
    """A pickle that would make a file when loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_loading_a_pickle_runs_nothing(tmp_path):
    (tmp_path / "evil").write_bytes(pickle.dumps(RunsCode(tmp_path / "ran")))
    with pytest.raises(BatchError, match="not a batch file"):
        DataProto.load_from_disk(tmp_path / "evil")
    assert not (tmp_path / "ran").exists()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing_here"):
        DataProto.load_from_disk(tmp_path / "nothing_here")


@pytest.mark.parametrize("kept", [0, 3, 7, 100, 0.5, 0.9, -1])
def test_a_truncated_file_is_refused(kept, tmp_path):
    of_every_dtype().save_to_disk(tmp_path / "batch")
    content = (tmp_path / "batch").read_bytes()
    (tmp_path / "batch").write_bytes(
        content[: int(kept * len(content)) if isinstance(kept, float) else kept]
    )
    with pytest.raises(BatchError, match="is damaged"):
        DataProto.load_from_disk(tmp_path / "batch")


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
        {
            "arrays": [
                {
                    "name": "o",
                    "shape": [3],
                    "dtype": "|O",
                    "rows": [{"!": "eval", "value": "1"}, 2, 3],
                }
            ]
        },
        {
            "arrays": [
                {
                    "name": "o",
                    "shape": [3],
                    "dtype": "|O",
                    "rows": [{"!": ["list"], "value": "1"}, 2, 3],
                }
            ]
        },
        {"arrays": {}, "meta_info": []},
        {"meta_info": {"x": {"!": "int8", "value": [1]}}, "rows": 4},
    ],
)
def test_a_document_that_lies_is_refused(change, tmp_path):
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


def test_other_safetensors_and_deep_json_are_refused(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / "other")
    deep = torch.frombuffer(bytearray(b"[" * 100_000), dtype=torch.uint8)
    save_file(
        {"document": deep}, tmp_path / "deep", {"format": "verl_like.DataProto", "version": "1"}
    )
    for name in ("other", "deep"):
        with pytest.raises(BatchError, match="not a batch file"):
            DataProto.load_from_disk(tmp_path / name)
