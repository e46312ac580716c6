"""Losses of pairs against plain Python: both are the same number, finite for every gap."""

from __future__ import annotations

import math

import pytest
import torch

from workers.losses.preference import REWARD_MODEL_LOSSES, compute_reward_loss, rank_accuracy

GAPS = [-1e4, -90.0, -3.0, -0.1, 0.0, 0.1, 3.0, 90.0, 1e4]


def in_plain_python(gap: float) -> tuple[float, float]:
    """Return -log sigmoid(gap) and its slope, in a form that does not overflow."""
    small = math.exp(-abs(gap))
    loss = math.log1p(small) + max(-gap, 0.0)
    return loss, -(small if gap > 0 else 1.0) / (1.0 + small)


@pytest.mark.parametrize("name", REWARD_MODEL_LOSSES)
def test_loss_and_gradient_are_right_for_gaps_up_to_10000(name: str) -> None:
    gaps = torch.tensor(GAPS, requires_grad=True)
    losses = REWARD_MODEL_LOSSES[name](gaps)
    losses.sum().backward()
    expected, slopes = zip(*map(in_plain_python, GAPS), strict=True)
    assert losses.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-8)
    assert gaps.grad is not None
    assert gaps.grad.tolist() == pytest.approx(slopes, rel=1e-6, abs=1e-8)


def test_a_margin_raises_the_target_gap_and_centering_limits_the_sum() -> None:
    scores = torch.tensor([[2.0, 0.5], [-1.0, 1.0]], dtype=torch.float64)
    margins = torch.tensor([1.0, 0.0], dtype=torch.float64)
    losses = compute_reward_loss(REWARD_MODEL_LOSSES["log_sigmoid"], scores, margins, 0.1)
    expected = [in_plain_python(0.5)[0] + 0.1 * 2.5**2, in_plain_python(-2.0)[0]]
    assert losses.tolist() == pytest.approx(expected, rel=1e-12)


def test_equal_scores_are_half_right() -> None:
    scores = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    assert rank_accuracy(scores).tolist() == [1.0, 0.0, 0.5]
