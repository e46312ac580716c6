"""DAPO's dynamic sampling: groups whose samples all score alike are replaced by groups of further
prompts.

Such a group has advantages of zero and teaches nothing (arXiv 2503.14476, section 3.2).
`PPOTrainer.make_samples` calls `collect_groups` when `algorithm.filter_groups.enable` is set.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.ppo.config import FilterGroupsConfig
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError, nearest
from workers.columns import read_columns

logger = logging.getLogger(__name__)


def collect_groups(
    draw: Callable[[int], DataProto], num_prompts: int, config: FilterGroupsConfig
) -> tuple[DataProto, dict[str, float]]:
    """`num_prompts` groups whose samples differ, in the order they were drawn, and how many draws
    that took.

    `draw(attempt)` gives scored samples of further prompts; of the metrics in their meta_info,
    counts and times are added up and the others averaged. After `max_num_gen_batches` draws the
    places that are still empty go to groups of equal scores, the first ones drawn: the batch keeps
    its size, and the metrics say how many.
    """
    kept: list[DataProto] = []
    spare: list[DataProto] = []
    reward_metrics: dict[str, list[float]] = {}
    num_kept = num_drawn = attempt = 0
    while num_kept < num_prompts and attempt < config.max_num_gen_batches:
        samples = draw(attempt)
        for name, value in samples.meta_info.pop("metrics", {}).items():
            reward_metrics.setdefault(name, []).append(value)
        group = group_numbers(samples)
        differs = groups_that_differ(read_metric(samples, config.metric), group)
        rows = torch.from_numpy(differs[group])
        kept.append(samples[rows])
        spare.append(samples[~rows])
        num_kept += int(differs.sum())
        num_drawn += len(differs)
        attempt += 1
    missing = max(num_prompts - num_kept, 0)
    if missing:
        logger.warning(
            "dynamic sampling: %d of %d groups have equal scores after %d generated batches "
            "(algorithm.filter_groups.max_num_gen_batches); they fill the batch and teach nothing",
            missing, num_prompts, attempt,
        )  # fmt: skip
    batch = first_groups(join(kept), num_prompts)
    if missing:
        batch = join([batch, first_groups(join(spare), missing)])
    metrics = {
        name: sum(v) if "/num_" in name or name.startswith("timing_s/") else sum(v) / len(v)
        for name, v in reward_metrics.items()
    }
    metrics |= {
        "dynamic_sampling/num_gen_batches": float(attempt),
        "dynamic_sampling/num_groups_drawn": float(num_drawn),
        "dynamic_sampling/num_groups_of_equal_scores": float(missing),
    }
    return batch, metrics


def read_metric(samples: DataProto, metric: str) -> Tensor:
    """One number per sample: its score, or a number that the reward function returned beside it."""
    if metric == "seq_reward":
        return read_columns(samples, "token_level_scores")["token_level_scores"].sum(dim=-1)
    extras = {
        n.removeprefix("reward_extra/"): n
        for n in samples.non_tensor_batch
        if n.startswith("reward_extra/")
    }
    if metric not in extras:
        valid = ["seq_reward", *sorted(extras)]
        raise ConfigError(
            f"algorithm.filter_groups.metric={metric}: choose seq_reward, or a number that the "
            "reward function returns beside its score; here: "
            f"{', '.join(valid)}.{nearest(metric, valid)}"
        )
    return torch.from_numpy(samples.non_tensor_batch[extras[metric]].astype(np.float64))


def join(parts: Sequence[DataProto]) -> DataProto:
    """All rows in order; numbers that the reward function gave for some parts alone are nan in the
    others.
    """
    names = {
        name for part in parts for name in part.non_tensor_batch if name.startswith("reward_extra/")
    }
    for part in parts:
        for name in names - part.non_tensor_batch.keys():
            part.non_tensor_batch[name] = np.full(len(part), np.nan)
    return DataProto.concat(parts)


def group_numbers(samples: DataProto) -> np.ndarray:
    """For every row the number of its group, in the order in which the uids appear."""
    numbers: dict[str, int] = {}
    return np.asarray(
        [numbers.setdefault(uid, len(numbers)) for uid in samples.non_tensor_batch["uid"]]
    )


def groups_that_differ(values: Tensor, group: np.ndarray) -> np.ndarray:
    """For every group whether its samples have more than one value; a group of one always counts as
    differing.
    """
    index = torch.from_numpy(group)
    num_groups = int(index.max()) + 1
    ends = [
        torch.zeros(num_groups, dtype=values.dtype).scatter_reduce_(
            0, index, values, how, include_self=False
        )
        for how in ("amin", "amax")
    ]
    return ((ends[0] != ends[1]) | (torch.bincount(index) == 1)).numpy()


def first_groups(samples: DataProto, num_groups: int) -> DataProto:
    """The rows of the first `num_groups` groups."""
    return (
        samples[torch.from_numpy(group_numbers(samples) < num_groups)] if len(samples) else samples
    )
