"""Estimators that compare samples of one prompt: a group of one, and GDPO's separate rewards."""

import numpy as np
import pytest
import torch

from tests.trainer.ppo.advantages.plain_python import batch_of
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
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


@pytest.mark.parametrize(
    ("name", "settings", "first", "second"),
    [
        ("grpo", {}, 0.5**0.5, -(0.5**0.5)),  # mean 2, standard deviation (n - 1) the root of 2
        ("grpo", {"norm_adv_by_std_in_grpo": False}, 1.0, -1.0),
        ("rloo", {}, 2.0, -2.0),  # less the other's score
        ("opo", {}, 4 / 3, -2 / 3),  # less (2 * 3 + 4 * 1) / 6
        ("gpg", {}, 1.0, -1.0),  # both scores count, so the scale is 1
        ("grpo_passk", {"norm_adv_by_std_in_grpo": False}, 2.0, 0.0),  # the best less the next
    ],
)
def test_one_score_a_sample_on_two_rows_of_four_tokens_worked_by_hand(
    name, settings, first, second
):
    """Two samples of a prompt: two tokens that score 3, four that score 1."""
    rewards = torch.tensor([[1.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    advantages, _ = ADVANTAGE_ESTIMATORS[name](
        token_level_rewards=rewards, response_mask=mask, index=["x", "x"], **settings
    )
    expected = torch.tensor([[first] * 2 + [0.0] * 2, [second] * 4])
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-5)
