"""Rewards, values and masks of all estimators."""

import pytest
import torch

from tests.trainer.ppo.advantages.plain_python import ROWS, WIDTH


@pytest.fixture
def mask():
    """Rows of 6, 4, 1, 0, 6, 3 and 2 tokens, three of them with holes."""
    mask = (torch.arange(WIDTH) < torch.tensor([[6], [4], [1], [0], [6], [3], [2]])).to(torch.int64)
    mask[0, 1:3] = 0
    mask[4, 0] = 0
    mask[5] = torch.tensor([0, 1, 0, 1, 1, 0])
    return mask


@pytest.fixture
def columns(mask):
    torch.manual_seed(0)
    rewards, values = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    return rewards * mask, values, mask  # values outside the mask are garbage
