"""Trained rows are the sampled rows: hashes are compared before an update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import RaggedTensor
from verl_like.errors import BatchError
from workers.columns import write_columns
from workers.rollout.sample import Sample, check_sample_hashes, sample_hash

P, R = 4, 6
SAMPLES = [
    Sample(
        [5, 6],
        tokens=torch.tensor([1, 2, 9, 3]),
        versions=torch.tensor([4, 4, -1, 5]),
        segments=(2,),
    ),
    Sample([5, 6, 7], tokens=torch.tensor([8]), versions=torch.tensor([4])),
]
"""Two turns, of which the second reads only one observed token; and a response of one token."""


def ragged_batch() -> DataProto:
    prompts = [torch.tensor(sample.prompt) for sample in SAMPLES]
    responses = RaggedTensor.from_rows([sample.tokens for sample in SAMPLES], R, fill=0)
    versions = torch.cat([sample.versions for sample in SAMPLES])
    positions = [torch.arange(len(sample.prompt) + len(sample.tokens)) for sample in SAMPLES]
    starts = P - torch.tensor([len(sample.prompt) for sample in SAMPLES])
    lengths = torch.tensor([len(row) for row in positions])
    mask = torch.ones(int(lengths.sum())).long()
    positions[0][4:] = torch.arange(2)
    columns = {
        "prompts": RaggedTensor.from_rows(prompts, P, at_end=True, fill=0),
        "responses": responses,
        "attention_mask": RaggedTensor(mask, lengths, P + R, starts, 0),
        "position_ids": RaggedTensor(torch.cat(positions), lengths, P + R, starts, 0),
        "response_mask": responses.with_values((versions >= 0).long()),
        "token_versions": responses.with_values(versions),
        "sample_hash": torch.tensor([sample_hash(sample) for sample in SAMPLES]),
        "sample_index": torch.tensor([0, 1]),
    }
    return DataProto.from_dict(columns, {"uid": np.array(["a", "a"], dtype=object)})


def padded_batch() -> DataProto:
    batch = ragged_batch()
    return batch.set_columns({name: batch.padded(name) for name in batch.columns})


@pytest.mark.parametrize("make", [ragged_batch, padded_batch])
@pytest.mark.parametrize("order", [[0, 1], [1, 0], [1, 1]])
def test_sampled_rows_match_their_hashes_in_any_order(
    make: Callable[[], DataProto], order: list[int]
) -> None:
    batch = make().select_idxs(order)
    assert check_sample_hashes(batch) == {"training/num_hash_matched_samples": 2.0}


@pytest.mark.parametrize("make", [ragged_batch, padded_batch])
@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("responses", (0, 1), 7),
        ("responses", (0, 2), 7),
        ("prompts", (0, 3), 7),
        ("token_versions", (0, 0), 3),
        ("token_versions", (0, 2), 4),
        ("response_mask", (0, 2), 1),
        ("position_ids", (0, P + 2), 4),
        ("position_ids", (0, P + 1), 0),
    ],
)
def test_any_changed_token_or_column_is_rejected_by_name(
    make: Callable[[], DataProto], name: str, place: tuple[int, int], value: int
) -> None:
    batch = make()
    changed = batch.padded(name).clone()
    changed[place] = value
    column = batch.column(name)
    batch.set_columns({name: column.like(changed) if isinstance(column, RaggedTensor) else changed})
    with pytest.raises(BatchError, match=r"1 of 2 samples differ from what the .*uid/index: a/0\)"):
        check_sample_hashes(batch)


def test_rows_without_loss_still_match_their_hashes() -> None:
    batch = ragged_batch()
    mask = batch.padded("response_mask").clone()
    mask[0] = 0
    matched = check_sample_hashes(write_columns(batch, response_mask=mask))
    assert matched == {"training/num_hash_matched_samples": 2.0}


def test_rows_without_hashes_are_not_checked() -> None:
    batch = ragged_batch()
    batch.pop(["sample_hash"])
    assert check_sample_hashes(batch) == {}


def test_rows_with_the_same_tokens_have_different_hashes() -> None:
    moved = Sample([5, 6, 1], tokens=torch.tensor([2, 9, 3]), versions=torch.tensor([4, -1, 5]))
    as_one = replace(SAMPLES[0], segments=())
    assert len({sample_hash(sample) for sample in (*SAMPLES, moved, as_one)}) == 4
