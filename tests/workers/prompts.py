"""Batches of prompts as the driver passes them to a rollout; usable in a rank's process."""

from __future__ import annotations

from typing import Any

import torch

from verl_like.batch.protocol import DataProto

META = {"eos_token_id": 2, "pad_token_id": 0}


def prompt_batch(rows: int, width: int = 6, meta: dict[str, Any] = META) -> DataProto:
    """Return left-padded prompts of 1 to `width` tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.arange(rows) % width + 1
    mask = (torch.arange(width) >= width - lengths[:, None]).long()
    ids = torch.randint(6, 50, (rows, width), generator=generator) * mask
    tensors = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "sample_index": torch.arange(rows) % 2,
    }
    return DataProto.from_dict(
        tensors, {"uid": [f"{row // 2}-0" for row in range(rows)]}, dict(meta)
    )
