"""Generalized advantage estimation."""

import pytest
import torch

from trainer.ppo.advantages import estimators
from trainer.ppo.advantages.estimators import compute_gae_advantage_return


@pytest.mark.parametrize("block", [2, 3, 64])
def test_the_block_size_changes_no_advantage(columns, block, monkeypatch):
    whole, _ = compute_gae_advantage_return(*columns, 0.9, 0.8)
    monkeypatch.setattr(estimators, "BLOCK", block)
    advantages, _ = compute_gae_advantage_return(*columns, 0.9, 0.8)
    torch.testing.assert_close(advantages, whole)


def test_gae_on_four_tokens_by_hand():
    rewards, values = torch.tensor([[0.0, 0.0, 1.0, 0.0]]), torch.tensor([[0.5, 0.25, 0.5, 9.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    # deltas 0 + .25 - .5, 0 + .5 - .25, 1 - .5; advantages .5 | .25 + .5 * .5 | -.25 + .5 * .5
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, 1.0, 0.5)
    assert returns.tolist() == [[0.5, 0.75, 1.0, 0.0]]
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, 0.5, 0.5, 0.0]]) / 0.75**0.5)
