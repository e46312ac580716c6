"""PF-PPO's policy filtration: an update trains on the step's samples drawn anew by their scores.

Rewards are least reliable in the middle: samples of high and low scores teach more (arXiv
2409.06957). `algorithm.use_pf_ppo` asks for it. Samples are drawn with replacement, as many as
there are, so mini-batches and losses stay as they are; the driver draws, in an order of its own, so
the draw is the same at every number of ranks.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trainer.ppo.config import PolicyFiltrationConfig
from workers.columns import read_columns, require

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto


def resample_by_score(
    batch: DataProto, config: PolicyFiltrationConfig, seed: int, step: int
) -> tuple[DataProto, dict[str, float]]:
    """As many rows, drawn by their scores, in the order of their names; and two metrics.

    Where all weights are zero, or all equal, every row stays once.
    """
    order = in_order_of_names(batch)
    scores = read_columns(batch, "token_level_scores")["token_level_scores"].sum(dim=-1)[order]
    weights = filtration_weights(scores, config.reweight_method, config.weight_pow)
    rows = draw_rows(weights, random.Random(f"pf_ppo {seed} {step}").random())

    kept, counts = rows.unique(return_counts=True)
    metrics = {
        "pf_ppo/kept_ratio": len(kept) / max(len(rows), 1),
        "pf_ppo/most_copies": float(counts.max()) if len(counts) else 0.0,
    }
    return batch[order[rows]], metrics


def in_order_of_names(batch: DataProto) -> Tensor:
    """The rows by uid and sample index: an order that does not depend on the number of ranks."""
    require(batch, "uid", "sample_index")
    uids = batch.non_tensor_batch["uid"].astype(str)
    index = read_columns(batch, "sample_index")["sample_index"].numpy()
    return torch.from_numpy(np.lexsort((index, uids)))


def filtration_weights(scores: Tensor, reweight_method: str, weight_pow: float = 2.0) -> Tensor:
    """What each sample's chance is proportional to, in float64: verl's three methods."""
    scores = scores.double()
    if reweight_method == "pow":
        return scores.abs() ** weight_pow
    highest = scores == scores.max()
    if reweight_method == "max_min":
        return (highest | (scores == scores.min())).double()
    return torch.where(highest, 0.4, 0.1).double()


def draw_rows(weights: Tensor, offset: float) -> Tensor:
    """As many row numbers as there are weights, ascending, by systematic sampling.

    One number `offset` in [0, 1) makes the whole draw: a row of share w of the weights is drawn
    n w times, rounded up or down.
    """
    total = weights.sum()
    if total <= 0:
        return torch.arange(len(weights))
    upto = (weights * (len(weights) / total)).cumsum(dim=0)
    places = torch.arange(len(weights), dtype=torch.float64) + offset
    drawn = torch.searchsorted(upto, places, right=True)
    last_possible = int(weights.nonzero()[-1])
    return drawn.clamp(max=last_possible)
