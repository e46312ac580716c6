"""The first stage: which groups of samples a step trains on, in an order for the ranks.

`algorithm.filter_groups` is DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): groups of
equal scores, whose advantages are zero, are replaced by groups of further prompts.

Rows are balanced over the ranks of the actor, as even in tokens as whole rows allow. W ranks get W
contiguous pieces of the batch, and mini-batch k of K is the rows whose number leaves k when divided
by K. So rows change places only with rows of their own mini-batch: every optimizer step has the
samples that it had, and its ranks are done at about the same time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.ppo.advantages.groups import Groups
from trainer.ppo.config import FilterGroupsConfig, PPOConfig
from trainer.ppo.estimate import clamp_scores
from trainer.rollouts.rollouts import Rollouts
from trainer.rollouts.samples import concat_rows, read_named_reward, repeat_prompts
from verl_like.batch.protocol import DataProto
from verl_like.tensor_ops import get_seqlen_balanced_partitions
from workers.columns import count_ones, read_columns, write_columns

FILTERED = "algorithm.filter_groups"
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

        groups = groups_of(samples)
        differs = groups_that_differ(read_named_reward(samples, config.metric, METRIC_KEY), groups)
        rows = differs[groups.of_row]
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
    """Metrics of the draws of one step: counts and times add up, other metrics are averaged.

    A `/max` or `/min` stays the largest or smallest value.
    """
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in drawn for name in metrics):
        values = [metrics[name] for metrics in drawn if name in metrics]
        if "/num_" in name or name.startswith("timing_s/"):
            result[name] = sum(values)
        elif name.endswith(("/max", "/min")):
            result[name] = max(values) if name.endswith("/max") else min(values)
        else:
            result[name] = sum(values) / len(values)
    return result


def greedy_scores(rollouts: Rollouts, prompts: DataProto, limit: float | None) -> Tensor:
    """Return the score of each prompt's greedy response, the baseline of ReMax.

    `limit` clamps the scores, as it clamps those that are compared with them.
    """
    responses = rollouts.generate(repeat_prompts(prompts, 1), do_sample=False)
    responses, _ = rollouts.score(responses)
    if limit is not None:
        responses, _ = clamp_scores(responses, limit)
    return read_columns(responses, "token_level_scores")["token_level_scores"].sum(dim=-1)


def groups_of(samples: DataProto) -> Groups:
    """The samples of each uid, numbered in the order in which the uids appear."""
    return Groups.of(samples.non_tensor_batch["uid"], torch.empty(0))


def groups_that_differ(values: Tensor, groups: Groups) -> Tensor:
    """For every group, whether its samples have more than one value.

    A group of one with a value always counts as differing. NaN is no value: a group without any
    does not differ.
    """
    ends = []
    for start, reduce in ((torch.inf, "amin"), (-torch.inf, "amax")):
        known = torch.where(values.isnan(), start, values)
        of_groups = torch.full(groups.size.shape, start, dtype=values.dtype)
        ends.append(of_groups.scatter_reduce(0, groups.of_row, known, reduce))
    lowest, highest = ends
    return (lowest < highest) | ((groups.size == 1) & (lowest == highest))


def first_groups(samples: DataProto, num_groups: int) -> DataProto:
    """The rows of the first `num_groups` groups."""
    return samples[groups_of(samples).of_row < num_groups]


def balance(
    batch: DataProto, config: PPOConfig, num_ranks: int
) -> tuple[DataProto, dict[str, float]]:
    """The samples in an order that gives the actor's ranks like numbers of tokens.

    Mini-batches stay the same samples: those of `actor.shuffle` go by numbers given before.
    """
    policy, critic = config.actor_rollout_ref, config.critic
    num_prompts = len(batch) // policy.rollout.n
    mini = policy.actor.ppo_mini_batch_size
    sizes = mini, critic.ppo_mini_batch_size or mini
    num_mini_batches = math.lcm(*(max(num_prompts // size, 1) for size in sizes))
    return balance_ranks(number_rows(batch, config), num_ranks, num_mini_batches)


def number_rows(batch: DataProto, config: PPOConfig) -> DataProto:
    """The samples with the numbers that `actor.shuffle` goes by."""
    if config.actor_rollout_ref.actor.shuffle:
        return write_columns(batch, sample_number=torch.arange(len(batch)))
    return batch


def balance_ranks(
    batch: DataProto, num_ranks: int, num_mini_batches: int
) -> tuple[DataProto, dict[str, float]]:
    """The batch with its rows in the better order, and tokens of a rank (`global_seqlen/...`).

    The batch stays as it is where the rows do not come out even over ranks and mini-batches, and
    where nothing is gained.
    """
    lengths = count_ones(batch, "attention_mask").numpy()
    before = after = _tokens_of_ranks(lengths, num_ranks)
    if num_ranks > 1 and len(batch) % (num_ranks * num_mini_batches) == 0:
        order = balanced_order(lengths, num_ranks, num_mini_batches)
        waits = [_slowest(rows, num_ranks, num_mini_batches) for rows in (lengths, lengths[order])]
        if waits[1] < waits[0]:
            batch, after = batch.reorder(order), _tokens_of_ranks(lengths[order], num_ranks)
    return batch, {
        "global_seqlen/min": float(before.min()),
        "global_seqlen/max": float(before.max()),
        "global_seqlen/minmax_diff": float(before.max() - before.min()),
        "global_seqlen/balanced_min": float(after.min()),
        "global_seqlen/balanced_max": float(after.max()),
        "global_seqlen/mean": float(lengths.sum() / num_ranks),
    }


def balanced_order(lengths: np.ndarray, num_ranks: int, num_mini_batches: int) -> np.ndarray:
    """Row numbers in the new order; ranks and mini-batches divide the rows."""
    places = np.arange(len(lengths)).reshape(num_ranks, -1)
    order = np.empty_like(places)
    for index in range(num_mini_batches):
        of_mini_batch = places % num_mini_batches == index
        rows = places[of_mini_batch]
        parts = get_seqlen_balanced_partitions(lengths[rows].tolist(), num_ranks, equal_size=True)
        order[of_mini_batch] = rows[np.concatenate(parts)]
    return order.ravel()


def _tokens_of_ranks(lengths: np.ndarray, num_ranks: int) -> np.ndarray:
    """Tokens of each rank's piece of the rows, as dispatch cuts them."""
    size = -(-len(lengths) // num_ranks)
    return np.asarray([lengths[rank * size : (rank + 1) * size].sum() for rank in range(num_ranks)])


def _slowest(lengths: np.ndarray, num_ranks: int, num_mini_batches: int) -> int:
    """Tokens of the fullest rank, for which a step's ranks wait in each mini-batch, added up."""
    return int(lengths.reshape(num_ranks, -1, num_mini_batches).sum(axis=1).max(axis=0).sum())
