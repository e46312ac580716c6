"""One small batch through the arithmetic of a PPO step, every number worked by hand.

Two responses of at most four tokens: the first ends with eos at its second token, the second never
ends.
"""

from __future__ import annotations

import pytest
import torch

from trainer.ppo.config import KLControlConfig
from trainer.ppo.estimate import KLController, apply_kl_penalty, clamp_scores
from verl_like.batch.protocol import DataProto

MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
OLD = torch.tensor([[-1.0, -2.0, 9.0, 9.0], [-1.0, -1.0, -1.0, -1.0]])
REF = torch.tensor([[-1.5, -1.0, 7.0, 8.0], [-1.2, -0.8, -1.0, -2.0]])
VALUES = torch.tensor([[1.0, 2.0, 5.0, 5.0], [0.5, 0.0, -1.0, -2.0]])


@pytest.fixture
def batch() -> DataProto:
    scores = torch.tensor([[0.0, 12.0, 0.0, 0.0], [0.0, 0.0, 0.0, -3.0]])  # at the last real token
    columns = {"old_log_probs": OLD, "ref_log_prob": REF, "values": VALUES, "response_mask": MASK}
    return DataProto.from_dict(
        {name: column.clone() for name, column in columns.items()} | {"token_level_scores": scores}
    )


def test_the_reward_is_the_clamped_score_less_the_kl(batch: DataProto) -> None:
    batch, metrics = clamp_scores(batch, 10.0)
    assert metrics == {"critic/score/clamped_ratio": 0.5}
    batch, metrics = apply_kl_penalty(batch, KLController(KLControlConfig(kl_coef=0.1)))
    # KL by token: 0.5, -1.0 | 0.2, -0.2, 0, 1.0; its means by row: -0.25 and 0.25
    expected = torch.tensor([[-0.05, 10.1, 0.0, 0.0], [-0.02, 0.02, 0.0, -3.1]])
    torch.testing.assert_close(batch.batch["token_level_rewards"], expected)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-7)
