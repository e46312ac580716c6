"""DAPO's dynamic sampling: groups of equal scores are replaced by groups of further prompts.

Such a group has advantages of zero and teaches nothing (arXiv 2503.14476, section 3.2).
`algorithm.filter_groups.enable` asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.ppo.config import FilterGroupsConfig
from trainer.rollouts.samples import concat_rows, read_named_reward
from verl_like.batch.protocol import DataProto

METRIC_KEY = "algorithm.filter_groups.metric"
logger = logging.getLogger(__name__)


def collect_groups(
    draw: Callable[[int], tuple[DataProto, dict[str, float]]],
    num_prompts: int,
    config: FilterGroupsConfig,
) -> tuple[DataProto, dict[str, float]]:
    """`num_prompts` groups whose samples differ, in the order they were drawn, and metrics.

    `draw(attempt)` gives scored samples of further prompts with their metrics. After
    `max_num_gen_batches` draws the places that are still empty go to groups of equal scores, the
    first ones drawn: the batch keeps its size, and the metrics say how many.
    """
    kept: list[DataProto] = []
    spare: list[DataProto] = []
    drawn: list[dict[str, float]] = []
    num_kept = num_drawn = 0
    while num_kept < num_prompts and len(drawn) < config.max_num_gen_batches:
        samples, metrics = draw(len(drawn))
        drawn.append(metrics)

        group = group_numbers(samples)
        differs = groups_that_differ(read_named_reward(samples, config.metric, METRIC_KEY), group)
        rows = torch.from_numpy(differs[group])
        kept.append(samples[rows])
        spare.append(samples[~rows])
        num_kept += int(differs.sum())
        num_drawn += len(differs)

    batch = first_groups(concat_rows(kept), num_prompts)
    missing = max(num_prompts - num_kept, 0)
    if missing:
        logger.warning(
            "dynamic sampling: %d of %d groups have equal scores after %d generated batches "
            "(algorithm.filter_groups.max_num_gen_batches); they fill the batch and teach nothing",
            missing,
            num_prompts,
            len(drawn),
        )
        batch = concat_rows([batch, first_groups(concat_rows(spare), missing)])

    return batch, {
        **over_draws(drawn),
        "dynamic_sampling/num_gen_batches": float(len(drawn)),
        "dynamic_sampling/num_groups_drawn": float(num_drawn),
        "dynamic_sampling/num_groups_of_equal_scores": float(missing),
    }


def over_draws(drawn: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Counts and times added up over the draws of one step, other metrics averaged."""
    values_of: dict[str, list[float]] = {}
    for metrics in drawn:
        for name, value in metrics.items():
            values_of.setdefault(name, []).append(value)

    result = {}
    for name, values in values_of.items():
        adds_up = "/num_" in name or name.startswith("timing_s/")
        result[name] = sum(values) if adds_up else sum(values) / len(values)
    return result


def group_numbers(samples: DataProto) -> np.ndarray:
    """For every row the number of its group, in the order in which the uids appear."""
    numbers: dict[str, int] = {}
    return np.asarray(
        [numbers.setdefault(uid, len(numbers)) for uid in samples.non_tensor_batch["uid"]]
    )


def groups_that_differ(values: Tensor, group: np.ndarray) -> np.ndarray:
    """For every group, whether its samples have more than one value.

    A group of one with a value always counts as differing. NaN is no value: a group without any
    does not differ.
    """
    index = torch.from_numpy(group)
    known = ~values.isnan()
    index_of_known, known_values = index[known], values[known]
    num_groups = int(index.max()) + 1

    lowest = torch.full((num_groups,), torch.inf, dtype=values.dtype)
    lowest.scatter_reduce_(0, index_of_known, known_values, "amin")
    highest = torch.full((num_groups,), -torch.inf, dtype=values.dtype)
    highest.scatter_reduce_(0, index_of_known, known_values, "amax")

    has_one_row = torch.bincount(index, minlength=num_groups) == 1
    return ((lowest < highest) | (has_one_row & (lowest == highest))).numpy()


def first_groups(samples: DataProto, num_groups: int) -> DataProto:
    """The rows of the first `num_groups` groups."""
    return (
        samples[torch.from_numpy(group_numbers(samples) < num_groups)] if len(samples) else samples
    )
