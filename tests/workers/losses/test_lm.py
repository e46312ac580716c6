from __future__ import annotations

import math

import pytest
import torch

from workers.losses.aggregate import compute_lm_loss

LOG_PROBS = torch.tensor([[-1.0, -2.0, -9.0], [-4.0, math.nan, -9.0]])
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


def test_the_loss_is_the_mean_over_the_tokens_inside_the_mask() -> None:
    assert float(compute_lm_loss(LOG_PROBS, MASK)) == pytest.approx((1 + 2 + 4) / 3)


def test_without_tokens_the_loss_is_zero() -> None:
    assert float(compute_lm_loss(LOG_PROBS, torch.zeros_like(MASK))) == 0
