"""The first stage: choose the groups of samples that a step trains on, and balance them over ranks.

`algorithm.filter_groups` is DAPO's dynamic sampling (arXiv 2503.14476, section 3.2): groups of
samples with equal values of `metric` are replaced by groups of further prompts. In an environment
with players, a group is kept if the values of any player differ.

Rows are balanced over the ranks of the actor so that ranks have nearly equal numbers of tokens. W
ranks get W contiguous chunks of the batch, and mini-batch k of K has the rows whose index is k
modulo K. Rows are therefore exchanged only within their mini-batch: every optimizer step keeps its
samples, and all ranks finish the step at about the same time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.ppo.advantage_inputs import compares_with_greedy
from trainer.ppo.advantages.estimators import Groups
from trainer.ppo.config import AlgorithmConfig, FilterGroupsConfig, PPOConfig
from trainer.ppo.scoring import clamp_scores
from trainer.rollouts.rollouts import Rollouts
from trainer.rollouts.samples import concat_rows, read_named_reward, repeat_prompts
from verl_like.batch.protocol import DataProto
from workers.columns import count_ones, sample_scores, split_player_uid, write_columns

METRIC_KEY = "algorithm.filter_groups.metric"
logger = logging.getLogger(__name__)


def collect_groups(
    sample_prompts: Callable[[int], tuple[DataProto, dict[str, float]]],
    num_prompts: int,
    config: FilterGroupsConfig,
) -> tuple[DataProto, DataProto, dict[str, float]]:
    """Return `num_prompts` groups whose samples differ, all drawn samples, and metrics.

    Groups come in the order of sampling.

    Samples differ if `filter_groups.metric` has several values. `sample_prompts(attempt)` returns
    scored samples of further prompts with their metrics. After `max_num_gen_batches` draws, groups
    of equal values fill the remaining places in sampling order. A metric counts these groups.
    """
    differing: list[DataProto] = []
    spare: list[DataProto] = []
    attempts: list[dict[str, float]] = []
    num_kept = num_sampled = 0
    while num_kept < num_prompts and len(attempts) < config.max_num_gen_batches:
        samples, metrics = sample_prompts(len(attempts))
        attempts.append(metrics)

        groups = prompt_groups(samples)
        values = read_named_reward(samples, config.metric, METRIC_KEY)
        players = Groups.of(samples.non_tensor_batch["uid"], torch.empty(0))
        differs = torch.zeros(len(groups.size), dtype=torch.bool)
        differs[groups.of_row[groups_that_differ(values, players)[players.of_row]]] = True
        rows = differs[groups.of_row]
        differing.append(samples[rows])
        spare.append(samples[~rows])
        num_kept += int(differs.sum())
        num_sampled += len(differs)

    batch = first_groups(concat_rows(differing), num_prompts)
    missing = max(num_prompts - num_kept, 0)
    if missing:
        logger.warning(
            "dynamic sampling: %d of the batch's %d groups have equal values of %s after %d "
            "generated batches (algorithm.filter_groups.max_num_gen_batches)",
            missing,
            num_prompts,
            config.metric,
            len(attempts),
        )
        batch = concat_rows([batch, first_groups(concat_rows(spare), missing)])

    return (
        batch,
        concat_rows(differing + spare),
        {
            **merge_attempts(attempts),
            "dynamic_sampling/num_gen_batches": float(len(attempts)),
            "dynamic_sampling/num_groups_sampled": float(num_sampled),
            "dynamic_sampling/num_groups_of_equal_scores": float(missing),
        },
    )


def merge_attempts(attempts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Merge the metrics of a step's draws: sum counts and times, and average other metrics.

    A count is a metric whose last part begins with `num_`, such as `reward/num_failed`. Of a metric
    that ends in `/max` or `/min`, keep the largest or smallest value.
    """
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for metrics in attempts for name in metrics):
        values = [metrics[name] for metrics in attempts if name in metrics]
        if name.rpartition("/")[2].startswith("num_") or name.startswith("timing_s/"):
            result[name] = sum(values)
        elif name.endswith(("/max", "/min")):
            result[name] = max(values) if name.endswith("/max") else min(values)
        else:
            result[name] = sum(values) / len(values)
    return result


def with_baselines(
    samples: DataProto, rollouts: Rollouts, prompts: DataProto, config: AlgorithmConfig
) -> DataProto:
    """Add ReMax's baseline, the score of a greedy response, if the estimator compares with it.

    `score_clip` clamps these scores as it clamps the scores of the samples. A player's baseline is
    its score when all players are greedy.
    """
    if not compares_with_greedy(config.adv_estimator):
        return samples
    responses = rollouts.generate(repeat_prompts(prompts, 1), do_sample=False)
    responses, _ = rollouts.score(responses)
    if config.score_clip is not None:
        responses, _ = clamp_scores(responses, config.score_clip)
    scores = sample_scores(responses)
    places = {uid: place for place, uid in enumerate(responses.non_tensor_batch["uid"])}
    baselines = scores[[places[uid] for uid in samples.non_tensor_batch["uid"]]]
    return samples.union(DataProto.from_dict({"reward_baselines": baselines}))


def num_mini_batches(config: PPOConfig, num_samples: int) -> int:
    """Return the number of parts of a step in which every mini-batch keeps its samples."""
    policy = config.actor_rollout_ref
    mini = policy.actor.ppo_mini_batch_size
    sizes = mini, config.critic.ppo_mini_batch_size or mini
    return math.lcm(*(max(num_samples // policy.rollout.n // size, 1) for size in sizes))


def prompt_groups(samples: DataProto) -> Groups:
    """Return the groups of samples by prompt, in the order in which the prompts appear.

    In an environment with players, a group has the samples of all players.
    """
    uids = samples.non_tensor_batch["uid"]
    return Groups.of([split_player_uid(str(uid))[0] for uid in uids], torch.empty(0))


def groups_that_differ(values: Tensor, groups: Groups) -> Tensor:
    """Return a mask of the groups whose samples have more than one value.

    A group of one counts as differing if it has a value. NaN does not count as a value, so a group
    that has only NaN does not differ.
    """
    ends = []
    for start, reduce in ((torch.inf, "amin"), (-torch.inf, "amax")):
        known = torch.where(values.isnan(), start, values)
        of_groups = torch.full(groups.size.shape, start, dtype=values.dtype)
        ends.append(of_groups.scatter_reduce(0, groups.of_row, known, reduce))
    lowest, highest = ends
    return (lowest < highest) | ((groups.size == 1) & (lowest == highest))


def first_groups(samples: DataProto, num_groups: int) -> DataProto:
    """Return the rows of the first `num_groups` groups."""
    return samples[prompt_groups(samples).of_row < num_groups]


def number_rows(batch: DataProto, config: PPOConfig) -> DataProto:
    """Add the sample numbers by which `actor.shuffle` orders samples, if it is set."""
    if config.actor_rollout_ref.actor.shuffle:
        return write_columns(batch, sample_number=torch.arange(len(batch)))
    return batch


def balance_ranks(
    batch: DataProto, num_ranks: int, num_mini_batches: int
) -> tuple[DataProto, dict[str, float]]:
    """Return the batch in a balanced order, with the tokens per rank (`global_seqlen/...`).

    The order stays unchanged if ranks x mini-batches does not divide the number of rows, or if the
    new order is no better.
    """
    lengths = count_ones(batch, "attention_mask").numpy()
    before = after = _tokens_of_ranks(lengths, num_ranks)
    if num_ranks > 1 and len(batch) % (num_ranks * num_mini_batches) == 0:
        order = balanced_order(lengths, num_ranks, num_mini_batches)
        shape = num_ranks, -1, num_mini_batches
        # the tokens of each mini-batch's slowest rank, summed over mini-batches
        wait, new_wait = (
            rows.reshape(shape).sum(axis=1).max(axis=0).sum() for rows in (lengths, lengths[order])
        )
        if new_wait < wait:
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
    """Return row indices in the new order; ranks x mini-batches must divide the number of rows."""
    from verl_like.balance import get_seqlen_balanced_partitions

    places = np.arange(len(lengths)).reshape(num_ranks, -1)
    order = np.empty_like(places)
    for index in range(num_mini_batches):
        of_mini_batch = places % num_mini_batches == index
        rows = places[of_mini_batch]
        parts = get_seqlen_balanced_partitions(lengths[rows].tolist(), num_ranks, equal_size=True)
        order[of_mini_batch] = rows[np.concatenate(parts)]
    return order.ravel()


def _tokens_of_ranks(lengths: np.ndarray, num_ranks: int) -> np.ndarray:
    """Return the number of tokens that each rank gets when dispatch splits the rows."""
    size = -(-len(lengths) // num_ranks)
    return np.asarray([lengths[rank * size : (rank + 1) * size].sum() for rank in range(num_ranks)])
