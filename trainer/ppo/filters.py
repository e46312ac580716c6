"""Filters: what an update leaves out of its samples, in the order in which they are applied.

    for name, sample_filter in active_filters(config).items():
        batch, metrics = sample_filter.apply(batch, config, step)

Every filter is registered here with its name; the update and the checks read this list. To add
one, register a function in your own module (`register_filter`).

A filter masks tokens in `response_mask`, weights them, or draws rows again; it changes the batch
before the losses see it. A masked token is in no mini-batch's mask and in no denominator, at any
number of ranks. Advantages are estimated earlier, from all samples. Under `bypass_mode` there are
no old log-probs yet, so the actor corrects within its update. PF-PPO draws samples by score,
because rewards are least reliable in the middle (arXiv 2409.06957).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.ppo.advantage_inputs import truncated_rows
from trainer.ppo.config import PPOConfig
from verl_like.batch.protocol import DataProto
from verl_like.registry import CallSignature, Registry, check_call
from workers.columns import (
    read_column,
    read_columns,
    require,
    sample_scores,
    sampled_log_probs_column,
    write_columns,
)
from workers.config import RolloutCorrectionConfig
from workers.rewards.weighted import SKIPPED

logger = logging.getLogger(__name__)
Filtered = tuple[DataProto, dict[str, float]]
FilterFunction = Callable[[DataProto, PPOConfig, int], Filtered]
"""(samples, config, step) -> (the samples that remain, metrics)."""


@dataclass(frozen=True)
class Filter:
    """A registered filter, and the arguments of `register_filter`."""

    apply: FilterFunction
    is_on: Callable[[PPOConfig], bool]
    resamples: bool
    """True if it draws rows again, by comparing all rows of the batch."""


FILTERS: Registry[Filter] = Registry("filter", entry="(batch, config, step) -> (batch, metrics)")
"""Filters by name, in the order in which they are applied."""


def register_filter(
    name: str,
    *,
    is_on: Callable[[PPOConfig], bool] = lambda config: True,
    resamples: bool = False,
) -> Callable[[FilterFunction], FilterFunction]:
    """Return a decorator that registers a filter of the samples that an update trains on.

    The function gets the samples, the configuration and the number of the step. It returns the
    samples that remain, and metrics. It runs after the built-in filters.

    Example:

        @register_filter("short responses")
        def without_short_responses(batch, config, step):
            mask = read_columns(batch, "response_mask")["response_mask"]
            is_short = mask.sum(dim=-1, keepdim=True) < 4
            batch = write_columns(batch.select(), response_mask=mask.masked_fill(is_short, 0))
            return batch, {}  # no metrics

    Args:
        name: the filter's name, which the hook `on_filter` gets.
        is_on: a function of the configuration that tells whether a run applies the filter.
        resamples: True if the filter draws rows again, so that ranks are balanced after it.

    Raises:
        ConfigError: the function does not take (batch, config, step), or the name is taken.
    """

    def enter(function: FilterFunction) -> FilterFunction:
        check_call(function, f"the filter {name!r}", CallSignature("batch", "config", "step"))
        FILTERS.register(name)(Filter(function, is_on, resamples))
        return function

    return enter


def active_filters(config: PPOConfig) -> dict[str, Filter]:
    """Return the filters of a run by name, in their order."""
    return {name: entry for name, entry in FILTERS.items() if entry.is_on(config)}


@register_filter(
    "algorithm.mask_truncated",
    is_on=lambda config: config.algorithm.mask_truncated,
)
def without_truncated(batch: DataProto, config: PPOConfig, step: int) -> Filtered:
    """Return a batch whose `response_mask` is zero in truncated samples, and their fraction.

    The other columns are shared with the argument. Mini-batches count tokens and rows by that mask,
    so the losses average over the remaining samples.
    """
    truncated = truncated_rows(batch)
    if truncated.all():
        logger.warning(
            "all %d samples of this step were truncated at the length limit, and "
            "algorithm.mask_truncated leaves them out, so the losses are zero. Raise "
            "data.max_response_length.",
            len(batch),
        )

    return _without(batch, truncated), {
        "response/truncated_ratio": truncated.double().mean().item()
    }


@register_filter("on_failure=skip")
def without_skipped(batch: DataProto, config: PPOConfig, step: int) -> Filtered:
    """Return a batch whose `response_mask` is zero in samples that `on_failure` skips."""
    if SKIPPED not in batch.non_tensor_batch:
        return batch, {}
    return _without(batch, torch.tensor(batch.non_tensor_batch[SKIPPED] == 1.0)), {}


def _without(batch: DataProto, left_out: Tensor) -> DataProto:
    mask = read_column(batch, "response_mask")
    return write_columns(batch.select(), response_mask=mask.masked_fill(left_out[:, None], 0))


def corrects(config: RolloutCorrectionConfig) -> bool:
    """Return whether `correct_rollout` weights or rejects tokens."""
    return not config.bypass_mode and (config.has_importance_weights or config.rejects_tokens)


@register_filter(
    "algorithm.rollout_correction",
    is_on=lambda config: corrects(config.algorithm.rollout_correction),
)
def correct_rollout(batch: DataProto, config: PPOConfig, step: int) -> Filtered:
    """Add importance weights to the batch, and mask out rejected tokens.

    `batch` is not changed.
    """
    from workers.losses.correction import RolloutCorrection, normalized

    settings = config.algorithm.rollout_correction
    correction = RolloutCorrection.from_config(settings)
    behavior = sampled_log_probs_column(batch.columns)
    columns = read_columns(batch, "old_log_probs", behavior, "response_mask")
    mask = columns["response_mask"]

    gauge = correction.gauge()
    weights, accepted = correction(columns["old_log_probs"], columns[behavior], mask, gauge)
    metrics = gauge.metrics()
    batch = batch.select()
    if weights is not None:
        if settings.rollout_is_batch_normalize:
            weights, mean = normalized(weights, mask.bool(), str(correction.level))
            metrics["rollout_corr/rollout_is_batch_norm_factor"] = mean
        write_columns(batch, rollout_is_weights=weights)
    return write_columns(batch, response_mask=accepted), metrics


@register_filter(
    "algorithm.use_pf_ppo", is_on=lambda config: config.algorithm.use_pf_ppo, resamples=True
)
def resample_by_score(batch: DataProto, config: PPOConfig, step: int) -> Filtered:
    """Return a batch of the same size with rows drawn by score, in order of uid, and two metrics.

    If all weights are zero, or all are equal, every row is drawn once.
    """
    order = in_order_of_names(batch)
    settings, scores = config.algorithm.pf_ppo, sample_scores(batch)[order]
    weights = filtration_weights(scores, settings.reweight_method, settings.weight_pow)
    rows = draw_rows(weights, random.Random(f"pf_ppo {config.trainer.seed} {step}").random())

    distinct, counts = rows.unique(return_counts=True)
    metrics = {
        "pf_ppo/kept_ratio": len(distinct) / max(len(rows), 1),
        "pf_ppo/most_copies": float(counts.max()) if len(counts) else 0.0,
    }
    return batch[order[rows]], metrics


def in_order_of_names(batch: DataProto) -> Tensor:
    """Return row indices by uid and sample index, an order independent of the number of ranks."""
    require(batch, "uid", "sample_index")
    uids = batch.non_tensor_batch["uid"].astype(str)
    index = read_column(batch, "sample_index").numpy()
    return torch.from_numpy(np.lexsort((index, uids)))


def filtration_weights(scores: Tensor, reweight_method: str, weight_pow: float = 2.0) -> Tensor:
    """Return each sample's unnormalized probability in float64, by one of verl's three methods."""
    scores = scores.double()
    if reweight_method == "pow":
        return scores.abs() ** weight_pow
    highest = scores == scores.max()
    if reweight_method == "max_min":
        return (highest | (scores == scores.min())).double()
    return torch.where(highest, 0.4, 0.1).double()


def draw_rows(weights: Tensor, offset: float) -> Tensor:
    """Draw as many row indices as there are weights by systematic sampling; return them sorted.

    One number `offset` in [0, 1) determines the whole draw. Of n rows, a row whose fraction of the
    total weight is w is drawn n w times, rounded up or down.
    """
    total = weights.sum()
    if total <= 0:
        return torch.arange(len(weights))
    upto = (weights * (len(weights) / total)).cumsum(dim=0)
    places = torch.arange(len(weights), dtype=torch.float64) + offset
    drawn = torch.searchsorted(upto, places, right=True)
    last_possible = int(weights.nonzero()[-1])
    return drawn.clamp(max=last_possible)
