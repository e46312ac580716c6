"""Generalised advantage estimation beside its backward recursion."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.trainer.ppo.advantages.plain_python import ROWS, positions, whitened
from trainer.ppo.advantages import returns as returns_module
from trainer.ppo.advantages.gae import compute_gae_advantage_return


def naive_gae(rewards, values, mask, gamma, lam):
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for row in range(ROWS):
        next_value = next_advantage = 0.0
        for t in reversed(positions(mask[row])):
            delta = rewards[row, t] + gamma * next_value - values[row, t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[row, t]
            advantages[row, t], returns[row, t] = next_advantage, next_advantage + next_value
    return advantages, returns


@pytest.mark.parametrize("block", [2, 3, 64])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.99, 0.0), (0.0, 1.0)])
def test_gae_equals_the_backward_recursion(columns, gamma, lam, block, monkeypatch):
    monkeypatch.setattr(returns_module, "BLOCK", block)
    rewards, values, mask = columns
    expected, expected_returns = naive_gae(rewards, values, mask, gamma, lam)
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(returns, expected_returns)
    torch.testing.assert_close(advantages, whitened(expected, mask))


def test_gae_on_four_tokens_worked_by_hand():
    rewards, values = torch.tensor([[0.0, 0.0, 1.0, 0.0]]), torch.tensor([[0.5, 0.25, 0.5, 9.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    # deltas 0 + .25 - .5, 0 + .5 - .25, 1 - .5; advantages .5 | .25 + .5 * .5 | -.25 + .5 * .5
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, 1.0, 0.5)
    assert returns.tolist() == [[0.5, 0.75, 1.0, 0.0]]
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, 0.5, 0.5, 0.0]]) / 0.75**0.5)


def test_long_rows_of_float32_match_the_recursion_in_float64():
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 3, 500)
    mask = torch.ones(3, 500, dtype=torch.int64)
    _, returns = compute_gae_advantage_return(rewards, values, mask, 1.0, 1.0)
    expected = rewards.double().flip(-1).cumsum(-1).flip(-1)
    torch.testing.assert_close(returns.double(), expected, rtol=1e-5, atol=1e-4)


class CountOperations(TorchDispatchMode):
    """Counts the tensor operations run inside it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_gae_loops_over_blocks_of_tokens_and_never_over_rows():
    counts = {}
    for rows, width in ((2, 512), (64, 512), (2, 1024)):
        rewards, values = torch.randn(2, rows, width)
        with CountOperations() as operations:
            compute_gae_advantage_return(
                rewards, values, torch.ones(rows, width, dtype=torch.int64), 1.0, 0.95
            )
        counts[rows, width] = operations.count
    assert counts[2, 512] == counts[64, 512]
    assert counts[2, 1024] - counts[2, 512] <= 10 * 512 // returns_module.BLOCK
