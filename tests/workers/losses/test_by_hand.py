"""Policy losses on two rows of four tokens, worked by hand.

Every token had probability 0.2. The first row (A = 1) has three tokens of ratios 1, 1.5 and 0.5,
the second (A = -2) four of ratios 1, 0.5, 2 and 4; ratios are clipped to 0.8 to 1.3, and the dual
clip is 3. Each entry is the sum over the seven tokens.
"""

from __future__ import annotations

import math

import pytest
import torch

from workers.config import ActorConfig
from workers.losses.registry import POLICY_LOSSES

CHANCES = torch.tensor([[0.2, 0.3, 0.1, torch.nan], [0.2, 0.1, 0.4, 0.8]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
ADVANTAGES = torch.tensor([[1.0], [-2.0]], dtype=torch.float64).expand(2, 4)
CLIP = ActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.3, clip_ratio_c=3.0)

LOG_02, LOG_03, LOG_01 = math.log(0.2), math.log(0.3), math.log(0.1)
LOG_04, LOG_08, LOG_2 = math.log(0.4), math.log(0.8), math.log(2)


def gate(tau: float, ratio: float) -> float:
    return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))


BY_HAND = {
    # 1.5 is clipped to 1.3, 0.5 acts | 0.5 is clipped to 0.8, 4 meets the dual clip
    "vanilla": -(1 + 1.3 + 0.5) + 2 * (1 + 0.8 + 2 + 3),
    # the weights 1, 1.3, 0.8 | 1, 0.8, 1.3, 1.3
    "cispo": -(LOG_02 + 1.3 * LOG_03 + 0.8 * LOG_01)
    + 2 * (LOG_02 + 0.8 * LOG_01 + 1.3 * LOG_04 + 1.3 * LOG_08),
    "reinforce": -(LOG_02 + LOG_03 + LOG_01) + 2 * (LOG_02 + LOG_01 + LOG_04 + LOG_08),
    # the mean ratios 0.75^(1/3), inside, and 4^(1/4), which is above 1.3 and worse unclipped
    "gspo": -3 * 0.75 ** (1 / 3) + 2 * 4 * 2**0.5,
    # log-ratios 0, 0.3, -log 2 | 0, -0.2, log 2, 2 log 2
    "geo_mean": -3 * math.exp((0.3 - LOG_2) / 3) + 2 * 4 * math.exp((3 * LOG_2 - 0.2) / 4),
    "sapo": -sum(gate(1.0, ratio) for ratio in (1, 1.5, 0.5))
    + 2 * sum(gate(1.05, ratio) for ratio in (1, 0.5, 2, 4)),
    # no probability moves by 0.3 up or 0.2 down; the ratio 4 is cut at 3
    "dppo_tv": -(LOG_02 + 1.5 * LOG_03 + 0.5 * LOG_01)
    + 2 * (LOG_02 + 0.5 * LOG_01 + 2 * LOG_04 + 3 * LOG_08),
    "dro": -(LOG_02 + LOG_03 + LOG_01)
    + 2 * (LOG_02 + LOG_01 + LOG_04 + LOG_08)
    + 0.025 * (math.log(1.5) ** 2 + LOG_2**2 * (1 + 1 + 1 + 4)),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_two_rows_of_four_tokens(name: str) -> None:
    old = torch.full((2, 4), LOG_02, dtype=torch.float64)
    loss, _ = POLICY_LOSSES[name](
        old, CHANCES.log(), ADVANTAGES, MASK, loss_agg_mode="token-sum", config=CLIP
    )
    assert loss.item() == pytest.approx(BY_HAND[name])
