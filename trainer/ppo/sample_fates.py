"""What becomes of a step's samples on their way into the losses, for `trainer.sample_ledger`.

It is counted in runs with faults on purpose. Reasons are called by their keys.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from trainer.ppo.config import PPOConfig
from trainer.ppo.left_out import CUT_BY_LENGTH
from trainer.sample_ledger import TRAINED
from workers.columns import read_columns
from workers.rewards.weighted import SKIPPED

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto

FILTERED = "algorithm.filter_groups"
EMPTY = "no token"


def fates_of(batch: DataProto, learned: DataProto, config: PPOConfig) -> dict[str, int]:
    """Of a step's samples: how many are in the losses of what is `learned`, and why others are not.

    A sample that PF-PPO has drawn several times is one.
    """
    given, kept = _with_tokens(batch), _with_tokens(learned)
    in_losses = Counter(name for name, has_tokens in kept if has_tokens)
    draws_anew = config.algorithm.use_pf_ppo
    became = Counter({TRAINED: len(in_losses) if draws_anew else in_losses.total()})
    handed_over = {name for name, _ in kept}

    unknown = [None] * len(batch)
    columns = batch.non_tensor_batch
    reasons, skipped = (columns.get(name, unknown) for name in ("finish_reason", SKIPPED))
    for row, (name, has_tokens) in enumerate(given):
        if name in in_losses:
            continue
        if not has_tokens:
            became[EMPTY] += 1
        elif config.algorithm.mask_truncated and reasons[row] == CUT_BY_LENGTH:
            became["algorithm.mask_truncated"] += 1
        elif skipped[row] == 1.0:
            became["on_failure=skip"] += 1
        elif draws_anew and name not in handed_over:
            became["algorithm.use_pf_ppo"] += 1
        else:
            became["algorithm.rollout_correction"] += 1
    return dict(became)


def _with_tokens(samples: DataProto) -> list[tuple[tuple[str, int], bool]]:
    """Every row's name, and whether a token of it is in the losses."""
    read = read_columns(samples, "sample_index", "response_mask")
    names = zip(samples.non_tensor_batch["uid"], read["sample_index"].tolist(), strict=True)
    return list(zip(names, read["response_mask"].any(dim=-1).tolist(), strict=True))
