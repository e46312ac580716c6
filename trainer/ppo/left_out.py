"""Samples that leave the losses, not the batch: cut by the length limit, or without a score.

To be left out after the advantages, which see them as before, as does every metric of the samples.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from workers.columns import read_columns, require
from workers.rewards.weighted import SKIPPED

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto

CUT_BY_LENGTH = "length"
"""The `finish_reason` of a sample that reached the limit before an end of sequence."""
logger = logging.getLogger(__name__)


def without_truncated(batch: DataProto) -> tuple[DataProto, dict[str, float]]:
    """A batch whose `response_mask` is zero in truncated samples, and the share that they are.

    It shares its other columns with the one given. Every mini-batch counts its tokens and rows by
    that mask, so the losses divide by what is left.
    """
    require(batch, "finish_reason")
    reasons = batch.non_tensor_batch["finish_reason"]
    truncated = torch.tensor([reason == CUT_BY_LENGTH for reason in reasons], dtype=torch.bool)
    if truncated.all():
        logger.warning(
            "all %d samples of this step were cut by the length limit, and "
            "algorithm.mask_truncated leaves them out: the losses are zero. Raise "
            "data.max_response_length.",
            len(batch),
        )

    return _without(batch, truncated), {
        "response/truncated_ratio": truncated.double().mean().item()
    }


def without_skipped(batch: DataProto) -> DataProto:
    """The same of samples that a failed reward skips, by its `on_failure`."""
    if SKIPPED not in batch.non_tensor_batch:
        return batch
    return _without(batch, torch.tensor(batch.non_tensor_batch[SKIPPED] == 1.0))


def _without(batch: DataProto, left_out: Tensor) -> DataProto:
    mask = read_columns(batch, "response_mask")["response_mask"]
    kept = batch.select()
    assert kept.batch is not None, "the mask was read from it"
    kept.batch["response_mask"] = mask.masked_fill(left_out[:, None], 0)
    return kept
