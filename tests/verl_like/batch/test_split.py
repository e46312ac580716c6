"""Chunks of a batch are the same rows, whether they travel alone or as parts of several chunks."""

from __future__ import annotations

import pytest
import torch

from verl_like import DataProto
from verl_like.batch.ragged import RaggedTensor
from verl_like.batch.split import RowsOfPart, split_into_parts, split_rows, take_rows


@pytest.mark.parametrize(("rows", "chunks"), [(24, 6), (23, 6), (25, 6), (2, 6), (6, 6), (7, 3)])
@pytest.mark.parametrize("per_part", [2, 3, 4, 8])
def test_chunks_of_shared_parts_are_those_of_a_plain_split(
    rows: int, chunks: int, per_part: int
) -> None:
    tokens = [torch.arange(row % 5) + row for row in range(rows)]
    batch = DataProto.from_dict(
        {"tokens": RaggedTensor.from_rows(tokens, width=8), "row": torch.arange(rows)},
        {"uid": [f"{row}" for row in range(rows)]},
        {"step": 3},
    )
    shared = split_into_parts(batch, chunks, per_part)
    taken = [take_rows(*chunk) if isinstance(chunk, RowsOfPart) else chunk for chunk in shared]
    for chunk, plain in zip(taken, split_rows(batch, chunks), strict=True):
        assert (chunk.shard, chunk.meta_info) == (plain.shard, plain.meta_info)
        assert chunk.non_tensor_batch["uid"].tolist() == plain.non_tensor_batch["uid"].tolist()
        for name in ("tokens", "row"):
            assert torch.equal(chunk.padded(name), plain.padded(name))
    parts = {id(chunk.part) for chunk in shared if isinstance(chunk, RowsOfPart)}
    assert len(parts) <= -(-chunks // per_part)
