"""Estimators that compare samples of one prompt: a group of one, and GDPO's separate rewards."""

import numpy as np
import pytest
import torch

from tests.trainer.ppo.advantages.plain_python import batch_of
from trainer.ppo.compute_advantage import compute_advantage
from verl_like.errors import ConfigError


def test_a_reward_that_no_sample_has_is_refused_with_those_that_there_are():
    mask = torch.ones(2, 1, dtype=torch.int64)
    batch = batch_of(torch.ones(2, 1), mask, token_level_scores=torch.ones(2, 1))
    batch.non_tensor_batch["reward_extra/format"] = np.array([1.0, 0.0])
    with pytest.raises(ConfigError, match="gdpo_reward_keys=fromat.*seq_reward, format.*'format'"):
        compute_advantage(batch, "gdpo", gdpo_reward_keys=["fromat"])
    batch = compute_advantage(batch, "gdpo", gdpo_reward_keys=["format"])
    torch.testing.assert_close(batch.batch["advantages"], torch.tensor([[0.5], [-0.5]]) * 2**0.5)
