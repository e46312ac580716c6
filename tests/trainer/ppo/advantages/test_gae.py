"""Generalized advantage estimation next to its backward recursion."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.ppo.advantages import returns as returns_module
from trainer.ppo.advantages.gae import compute_gae_advantage_return


@pytest.mark.parametrize("block", [2, 3, 64])
def test_the_blocks_in_which_errors_are_summed_do_not_show(columns, block, monkeypatch):
    whole, _ = compute_gae_advantage_return(*columns, 0.9, 0.8)
    monkeypatch.setattr(returns_module, "BLOCK", block)
    advantages, _ = compute_gae_advantage_return(*columns, 0.9, 0.8)
    torch.testing.assert_close(advantages, whole)


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
    """Counts the tensor operations inside it."""

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
