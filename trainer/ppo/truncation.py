"""Overlong filtering: samples that the length limit cut leave the losses, not the batch.

`PPOTrainer.update` calls it. Scores, advantages and every metric of the samples see them as before.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from workers.columns import read_columns, require

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

    mask = read_columns(batch, "response_mask")["response_mask"]
    kept = batch.select()
    assert kept.batch is not None, "the mask was read from it"
    kept.batch["response_mask"] = mask.masked_fill(truncated[:, None], 0)
    return kept, {"response/truncated_ratio": truncated.double().mean().item()}
