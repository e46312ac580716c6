"""A sample's rewards by name: its score, and what the reward function returns beside it.

Dynamic sampling compares groups by one of them, GDPO normalises several.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trainer.ppo.samples import EXTRA
from verl_like.errors import ConfigError, nearest
from workers.columns import read_columns

if TYPE_CHECKING:
    from trainer.ppo.config import AlgorithmConfig
    from verl_like.batch.protocol import DataProto

SCORE = "seq_reward"
"""The name of the score itself."""


METRIC_KEY = "algorithm.filter_groups.metric"
GDPO_KEY = "algorithm.gdpo_reward_keys"


def check_named_rewards(algorithm: AlgorithmConfig, scored: DataProto) -> None:
    """Refuse names that these samples have no number for."""
    named = [(GDPO_KEY, name) for name in algorithm.gdpo_reward_keys]
    if algorithm.filter_groups.enable:
        named.append((METRIC_KEY, algorithm.filter_groups.metric))
    for key, name in named:
        read_named_reward(scored, name, key)


def read_named_reward(batch: DataProto, name: str, key: str) -> Tensor:
    """One number per sample; nan where the function returned none under that name.

    `key` is the configuration key that names it.
    """
    if name == SCORE:
        return read_columns(batch, "token_level_scores")["token_level_scores"].sum(dim=-1)

    columns = batch.non_tensor_batch
    if EXTRA + name not in columns:
        extras = sorted(column for column in columns if column.startswith(EXTRA))
        valid = [SCORE, *(column.removeprefix(EXTRA) for column in extras)]
        raise ConfigError(
            f"{key}={name}: choose {SCORE}, or a number that the reward function returns beside "
            f"its score; here: {', '.join(valid)}.{nearest(name, valid)}"
        )
    return torch.from_numpy(columns[EXTRA + name].astype(np.float64))
