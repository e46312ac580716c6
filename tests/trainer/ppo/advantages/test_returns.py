"""The estimators without groups: REINFORCE++ and ReMax, beside loops over tokens."""

import pytest
import torch

from tests.trainer.ppo.advantages.plain_python import ROWS, WIDTH, positions, whitened
from trainer.ppo.advantages.reinforce_plus_plus import (
    compute_reinforce_plus_plus_outcome_advantage,
)
from trainer.ppo.advantages.remax import compute_remax_outcome_advantage


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_equals_discounted_returns_whitened(columns, gamma):
    rewards, _, mask = columns
    expected = torch.zeros_like(rewards)
    for row in range(ROWS):
        running = 0.0
        for t in reversed(positions(mask[row])):
            running = rewards[row, t] + gamma * running
            expected[row, t] = running
    advantages, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma)
    torch.testing.assert_close(returns, expected)
    torch.testing.assert_close(advantages, whitened(expected, mask))


def test_remax_equals_returns_less_the_baseline(columns):
    rewards, _, mask = columns
    baselines = torch.randn(ROWS, dtype=torch.float64)
    advantages, returns = compute_remax_outcome_advantage(rewards, baselines, mask)
    for row in range(ROWS):
        for t in range(WIDTH):
            expected = rewards[row, t:].sum() * mask[row, t]
            torch.testing.assert_close(returns[row, t], expected)
            torch.testing.assert_close(advantages[row, t], expected - baselines[row] * mask[row, t])
