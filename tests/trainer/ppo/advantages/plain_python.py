"""Rows, groups and whole batches for all estimators."""

import statistics

import numpy as np
import torch

from verl_like.batch.protocol import DataProto

ROWS, WIDTH = 7, 6
INDEX = np.array(["a", "b", "a", "c", "b", "a", "b"], dtype=object)  # three samples, three, and one
NAMES = ["seq_reward", "accuracy", "style"]


def positions(row):
    return [t for t in range(WIDTH) if row[t]]


def whitened_rows(advantages, mask):
    inside = [advantages[row][t] for row in range(ROWS) for t in positions(mask[row])]
    mean, std = statistics.mean(inside), (statistics.variance(inside) + 1e-8) ** 0.5
    return [
        [(advantages[row][t] - mean) / std if mask[row][t] else 0.0 for t in range(WIDTH)]
        for row in range(ROWS)
    ]


def batch_of(rewards, mask, **more):
    tensors = {"token_level_rewards": rewards, "response_mask": mask, **more}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": INDEX[: len(mask)]})


def whole_batch(rewards, values, mask):
    """Return a batch with every column that an estimator reads; half of the tokens end a step."""
    generator = torch.Generator().manual_seed(1)
    steps = torch.rand(mask.shape, generator=generator) < 0.5
    chances = 0.1 + 0.8 * torch.rand(mask.shape, generator=generator, dtype=rewards.dtype)
    style = np.array([1.0, np.nan, 3.0, np.nan, 0.5, -1.0, 2.0])
    accuracy = np.array([0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    batch = batch_of(
        rewards,
        mask,
        values=values,
        token_level_scores=rewards.clone(),
        step_ends=steps,
        old_log_probs=chances.log(),
        sum_pi_squared=chances.square() + 0.01,
        reward_baselines=torch.linspace(-1, 1, ROWS, dtype=rewards.dtype),
    )
    batch.non_tensor_batch["reward_extra/accuracy"] = accuracy
    batch.non_tensor_batch["reward_extra/style"] = style
    batch.non_tensor_batch["finish_reason"] = np.array(["length", "stop"] * 3 + ["length"])
    return batch
