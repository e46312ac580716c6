"""Batches for the tests of DataProto, and their comparison."""

import numpy as np
import torch

from verl_like.batch.columns import same_value
from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import RaggedTensor

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.bool,
    torch.uint16,
    torch.float8_e4m3fn,
]


def make(rows=4, **meta):
    """Return a batch whose row numbers can be read off every column."""
    return DataProto.from_dict(
        {
            "ids": torch.arange(rows * 2).reshape(rows, 2),
            "score": torch.arange(rows, dtype=torch.float32),
        },
        {"uid": [f"{row}-0" for row in range(rows)], "weight": np.arange(rows, dtype=np.float64)},
        meta,
    )


def of_every_dtype(rows=3):
    """Return a batch with a tensor column of each of DTYPES, an array and objects."""
    return DataProto.from_dict(
        {str(dtype): torch.arange(rows * 2).reshape(rows, 2).to(dtype) for dtype in DTYPES},
        {"n": np.arange(rows, dtype=np.int16), "uid": [f"{row}" for row in range(rows)]},
        {"t": 0.5},
    )


def assert_same(left, right):
    assert same_value(left.columns, right.columns)
    assert ragged_names(left) == ragged_names(right)
    assert same_value(left.non_tensor_batch, right.non_tensor_batch)
    assert same_value(left.meta_info, right.meta_info)
    assert len(left) == len(right)


def ragged_names(data):
    return [name for name, column in data.columns.items() if isinstance(column, RaggedTensor)]


def uids(data):
    return data.non_tensor_batch["uid"].tolist()
