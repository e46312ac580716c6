"""A run ends with its curves, in at most four lines that fit the terminal and its letters."""

from __future__ import annotations

import io
import math
import sys

import pytest

from trainer.report.sparklines import BLOCKS, curve, sparklines

PPO = [
    {
        "step": step,
        "critic/score/mean": step / 10,
        "response_length/mean": 8.0 - step / 100,
        "actor/reward_kl_penalty": 0.0,
        "actor/ppo_kl": 0.001 * step,
    }
    for step in range(1, 301)
]


def test_reward_length_and_the_kl_that_moves_are_drawn() -> None:
    reward, length, kl = sparklines(PPO, None)
    assert reward.split()[:2] == ["reward", "0.1"]
    assert reward.split()[-1] == "30"
    assert reward.split()[2] == "".join(sorted(reward.split()[2]))
    assert (length.split()[0], kl.split()[0], kl.split()[-1]) == ("length", "KL", "0.3")


def test_a_reward_that_stays_zero_is_a_flat_line_and_a_kl_none() -> None:
    still = [{"step": 1, "critic/score/mean": 0.0, "actor/ppo_kl": 0.0}] * 3
    assert sparklines(still, None) == ["reward  0 ▁▁▁ 0"]


def test_rows_have_their_losses_and_one_step_no_curve() -> None:
    rows = [{"step": step, "train/loss": 3.0 - step} for step in (1, 2)]
    rows[1]["val/loss"] = 0.5
    assert sparklines(rows, None) == ["loss  2 █▁ 1"]
    assert sparklines([{"step": 0, "val/loss": 1.0}, *rows], None)[1] == "val loss  1 █▁ 0.5"
    assert sparklines(rows[:1], None) == []


@pytest.mark.parametrize("width", [20, 40, 80, 300])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    assert max(map(len, sparklines(PPO, width))) <= width


def test_a_console_without_blocks_gets_letters_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    assert all(line.isascii() for line in sparklines(PPO, None))


def test_what_is_not_finite_leaves_a_gap_and_scales_nothing() -> None:
    assert curve([0.0, math.nan, math.inf, 1.0], 60) == f"{BLOCKS[0]}  {BLOCKS[-1]}"
    assert curve([math.nan] * 3, 60) == "   "
