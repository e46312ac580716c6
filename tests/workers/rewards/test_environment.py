"""Rewards of environments, by turn."""

from __future__ import annotations

import torch

from workers.rewards.environment import turn_ends


def test_a_turn_ends_at_its_last_sampled_token() -> None:
    turn = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [0, 0, 0, 0]])
    mask = torch.tensor([[1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]).bool()
    ends = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
    assert torch.equal(turn_ends(turn, mask), ends)
