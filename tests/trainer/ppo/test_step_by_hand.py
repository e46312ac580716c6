"""One small batch through the arithmetic of a PPO step, every number worked by hand.

Two responses of at most four tokens: the first ends with eos at its second token, the second never
ends.
"""

from __future__ import annotations

import pytest
import torch

from trainer.ppo.advantage_inputs import compute_advantage
from trainer.ppo.config import KLControlConfig
from trainer.ppo.scoring import KLController, apply_kl_penalty, clamp_scores
from verl_like.batch.protocol import DataProto
from workers.config import ActorConfig
from workers.losses.policy import compute_policy_loss_vanilla
from workers.losses.value import compute_value_loss

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


def test_the_reward_is_the_clamped_score_at_the_last_token_less_the_kl_of_every_token(
    batch: DataProto,
) -> None:
    batch, metrics = clamp_scores(batch, 10.0)
    assert metrics == {"critic/score/clamped_ratio": 0.5}
    batch, metrics = apply_kl_penalty(batch, KLController(KLControlConfig(kl_coef=0.1)))
    # KL by token: 0.5, -1.0 | 0.2, -0.2, 0, 1.0; its means by row: -0.25 and 0.25
    expected = torch.tensor([[-0.05, 10.1, 0.0, 0.0], [-0.02, 0.02, 0.0, -3.1]])
    torch.testing.assert_close(batch.batch["token_level_rewards"], expected)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-7)


def test_advantages_and_returns_follow_from_rewards_and_values(batch: DataProto) -> None:
    batch, _ = clamp_scores(batch, 10.0)
    batch, _ = apply_kl_penalty(batch, KLController(KLControlConfig(kl_coef=0.1)))
    batch = compute_advantage(batch, "gae", gamma=1.0, lam=0.95)
    # deltas 0.95, 8.1 | -0.52, -0.98, -1.0, -1.1; advantages 8.645, 8.1 | -3.2966125, -2.92275,
    # -2.045, -1.1
    returns = torch.tensor([[9.645, 10.1, 0.0, 0.0], [-2.7966125, -2.92275, -3.045, -3.1]])
    torch.testing.assert_close(batch.batch["returns"], returns)
    # their mean is 1.23010625, the sum of their squared deviations 156.0692, the standard deviation
    # 5.58693
    whitened = torch.tensor(
        [[1.32718, 1.22964, 0.0, 0.0], [-0.81023, -0.74332, -0.58621, -0.41706]]
    )
    torch.testing.assert_close(batch.batch["advantages"], whitened, rtol=0, atol=1e-5)


def test_the_actors_loss_is_the_clipped_ratios_mean_over_tokens() -> None:
    ratio = torch.tensor([[1.5, 0.5, 1.0, 1.0], [1.0, 2.0, 2.0, 0.5]])
    advantages = torch.tensor([[1.0, -1.0, 3.0, 3.0], [2.0, 0.0, -2.0, 1.0]])
    log_prob = (OLD + ratio.log()).requires_grad_()
    loss, metrics = compute_policy_loss_vanilla(
        OLD, log_prob, advantages, MASK, "token-mean", ActorConfig()
    )
    # by token: -1.2 (clipped), 0.8 (clipped) | -2.0, 0, 4.0 (a large ratio of a bad token is not
    # clipped), -0.5
    assert loss.item() == pytest.approx((-1.2 + 0.8 - 2.0 + 0.0 + 4.0 - 0.5) / 6)
    assert float(metrics["actor/pg_clipfrac"]) == pytest.approx(2 / 6)
    # of a token that is not clipped, the derivative is -A r, divided by the six tokens
    (gradient,) = torch.autograd.grad(loss, log_prob)
    expected = torch.tensor([[0.0, 0.0, 0.0, 0.0], [-2.0, 0.0, 4.0, -0.5]]) / 6
    torch.testing.assert_close(gradient, expected)


def test_the_critics_loss_is_half_the_worse_of_clipped_and_plain_squared_error() -> None:
    values = torch.tensor([[1.0, 2.0, 5.0, 5.0], [0.0, 0.0, 0.0, 0.0]])
    predicted = torch.tensor([[1.3, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, -1.0]])
    returns = torch.tensor([[2.0, 2.0, 9.0, 9.0], [0.0, 1.0, 0.0, -1.0]])
    loss, clipped = compute_value_loss(predicted, returns, values, MASK, 0.5)
    # by token: 0.49, 1.0 | 1.0, 1.0, 0, 0.25 (clipped at -0.5)
    assert loss.item() == pytest.approx(0.5 * (0.49 + 1.0 + 1.0 + 1.0 + 0.0 + 0.25) / 6)
    assert clipped.item() == pytest.approx(1 / 6)
