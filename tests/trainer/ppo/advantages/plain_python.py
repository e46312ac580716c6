"""What the loops share that every estimator is compared with."""

import statistics

import numpy as np
import torch

from verl_like.batch.protocol import DataProto

ROWS, WIDTH = 7, 6
INDEX = np.array(["a", "b", "a", "c", "b", "a", "b"], dtype=object)  # three samples, three, and one


def positions(row):
    return [t for t in range(WIDTH) if row[t]]


def whitened(advantages, mask):
    inside = [advantages[row, t].item() for row in range(ROWS) for t in positions(mask[row])]
    mean, std = statistics.mean(inside), statistics.stdev(inside)
    return torch.where(mask.bool(), (advantages - mean) / std, 0)


def naive_groups(scores):
    """For each row: the scores of its group, and of the group's others."""
    scores = scores.tolist()
    for row in range(ROWS):
        group = [other for other in range(ROWS) if INDEX[other] == INDEX[row]]
        others = [other for other in group if other != row]
        yield [scores[other] for other in group], [scores[other] for other in others]


def spread(scores, mask):
    return torch.tensor(scores, dtype=torch.float64).unsqueeze(-1) * mask


def batch_of(rewards, mask, **more):
    tensors = {"token_level_rewards": rewards, "response_mask": mask, **more}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": INDEX[: len(mask)]})
