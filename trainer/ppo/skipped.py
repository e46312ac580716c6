"""Samples that a failed reward leaves out of the update, by its `on_failure=skip`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from workers.columns import read_columns
from workers.rewards.weighted import SKIPPED

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto


def without_skipped(batch: DataProto) -> DataProto:
    """A batch whose `response_mask` is zero in skipped samples; its other columns are shared."""
    if SKIPPED not in batch.non_tensor_batch:
        return batch
    skipped = torch.tensor(batch.non_tensor_batch[SKIPPED] == 1.0)
    mask = read_columns(batch, "response_mask")["response_mask"]
    kept = batch.select()
    assert kept.batch is not None, "the mask was read from it"
    kept.batch["response_mask"] = mask.masked_fill(skipped[:, None], 0)
    return kept
