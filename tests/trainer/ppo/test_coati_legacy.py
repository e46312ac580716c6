"""`algorithm=coati_legacy` on responses of at most three tokens, every number worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from trainer import load_config
from trainer.ppo.compute_advantage import advantages_of
from trainer.ppo.config import PPOConfig
from trainer.ppo.estimate import KLController, apply_kl_penalty
from verl_like.batch.protocol import DataProto

LN2 = math.log(2.0)
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
LOG_RATIO = torch.tensor([[LN2, 0.0, -LN2], [LN2, 5.0, 5.0]], dtype=torch.float64)
VALUES = torch.tensor([[0.3, 0.1, 0.5], [-0.2, 9.0, 9.0]], dtype=torch.float64)
SCORES = torch.tensor([[0.0, 0.0, 2.0], [-1.0, 0.0, 0.0]], dtype=torch.float64)
KL = [(2 - 1 - LN2 + 0.0 + 0.5 - 1 + LN2) / 3, 2 - 1 - LN2]
"""exp(x) - 1 - x, the mean over a response: 1/6, and 1 - ln 2."""
REWARDS = [2.0 - 0.1 / 6, -1.0 - 0.1 * (1 - LN2)]


@pytest.fixture(scope="module")
def config() -> PPOConfig:
    needed = ("data.train_files=x", "actor_rollout_ref.model.path=y", "trainer.backend=local")
    return load_config([*needed, "algorithm=coati_legacy"])


@pytest.fixture(scope="module")
def batch(config: PPOConfig) -> DataProto:
    """Return rewards, advantages and returns as a step of that configuration computes them."""
    columns = {"response_mask": MASK, "token_level_scores": SCORES, "values": VALUES}
    log_probs = {"old_log_probs": LOG_RATIO - 3.0, "ref_log_prob": torch.full_like(LOG_RATIO, -3.0)}
    batch = DataProto.from_dict(columns | log_probs)
    algorithm = config.algorithm
    controller = KLController(algorithm.kl_ctrl)
    batch, metrics = apply_kl_penalty(
        batch, controller, algorithm.kl_penalty, None, algorithm.kl_penalty_per
    )
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(sum(KL) / 2)
    return advantages_of(batch, algorithm)


def test_a_response_has_one_reward_its_score_less_a_tenth_of_its_mean_kl(batch: DataProto) -> None:
    expected = [[0.0, 0.0, REWARDS[0]], [REWARDS[1], 0.0, 0.0]]
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(batch.batch["token_level_rewards"], expected)
    assert REWARDS == pytest.approx([1.9833333, -1.0306853])


def test_the_advantage_is_the_reward_less_the_last_value_on_every_token(batch: DataProto) -> None:
    first, second = REWARDS[0] - 0.5, REWARDS[1] + 0.2
    expected = torch.tensor([[first] * 3, [second, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(batch.batch["advantages"], expected)
    assert (first, second) == pytest.approx((1.4833333, -0.8306853))


def test_losses_are_clipped_as_in_colossalchat_per_response(config: PPOConfig) -> None:
    actor, critic = config.actor_rollout_ref.actor, config.critic
    assert (actor.clip_ratio, actor.clip_ratio_c, critic.cliprange_value) == (0.2, 1e9, 0.4)
    assert actor.loss_agg_mode == "seq-mean-token-mean"
