"""Groups of one to four ranks without processes, batches for them, and their comparison."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.verl_like.fake_transport import fake_group
from verl_like import DataProto

GROUPS = {n: fake_group(n) for n in (1, 2, 3, 4)}
worlds = pytest.mark.parametrize("world", GROUPS)


def batch(rows: int, seed: int = 0) -> DataProto:
    generator = torch.Generator().manual_seed(seed)
    return DataProto.from_dict(
        {"x": torch.arange(rows), "y": torch.randn(rows, 3, generator=generator)},
        {"o": np.array([{"row": i} if i % 2 else None for i in range(rows)], dtype=object)},
        meta_info={"eos": [1, 2], "name": "m"},
    )


def assert_same(left: DataProto, right: DataProto, but: tuple[str, ...] = ("rank",)) -> None:
    assert len(left) == len(right)
    assert {k for k in left.batch.keys() if k not in but} == set(right.batch.keys())
    for name, column in right.batch.items():
        assert torch.equal(left.batch[name], column), name
    assert [list(c) for c in left.non_tensor_batch.values()] == [
        list(c) for c in right.non_tensor_batch.values()
    ]
    assert left.meta_info == right.meta_info
