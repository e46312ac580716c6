"""The KL in the reward, and the controllers of its coefficient."""

import math

import pytest
import torch

from trainer.ppo.config import KLControlConfig
from trainer.ppo.scoring import KLController, apply_kl_penalty, clamp_scores
from verl_like.batch.protocol import DataProto
from verl_like.errors import MissingColumnError


def batch_of(mask=((1, 1, 1, 0), (1, 0, 0, 0))):
    return DataProto.from_dict(
        tensors={
            "response_mask": torch.tensor(mask),
            "token_level_scores": torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.5, 0.0, 0.0, 0.0]]),
            "old_log_probs": torch.tensor([[-1.0, -2.0, -1.0, torch.nan], [-1.0, 7.0, 7.0, 7.0]]),
            "ref_log_prob": torch.tensor([[-1.5, -1.0, -2.0, torch.nan], [-1.0, 0.0, 0.0, 0.0]]),
        }
    )


def fixed(kl_coef):
    return KLController(KLControlConfig(kl_coef=kl_coef))


def adaptive(kl_coef, **settings):
    return KLController(KLControlConfig(type="adaptive", kl_coef=kl_coef, **settings))


def test_the_reward_is_the_score_minus_the_weighted_kl_of_response_tokens():
    batch, metrics = apply_kl_penalty(batch_of(), fixed(0.1))
    expected = torch.tensor([[-0.05, 0.1, 0.9, 0.0], [0.5, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(batch.batch["token_level_rewards"], expected)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(((0.5 - 1.0 + 1.0) / 3 + 0.0) / 2)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1


def test_scores_are_clamped_before_the_kl_is_subtracted():
    batch = batch_of(mask=((1, 1, 1, 0), (1, 1, 1, 1)))
    batch.batch["token_level_scores"] *= 12
    batch, metrics = clamp_scores(batch, 10.0)
    assert metrics == {"critic/score/clamped_ratio": 0.5}
    batch, _ = apply_kl_penalty(batch, fixed(0.1))
    expected = torch.tensor([[-0.05, 0.1, 9.9, 0.0], [6.0, -0.7, -0.7, -0.7]])
    torch.testing.assert_close(batch.batch["token_level_rewards"], expected)


def test_a_penalty_per_sequence_subtracts_its_mean_kl_at_the_last_token():
    batch, metrics = apply_kl_penalty(batch_of(), fixed(0.1), "k3", kl_penalty_per="sequence")
    k3 = [math.exp(x) - 1 - x for x in (-0.5, 1.0, -1.0)]
    expected = torch.tensor([[0.0, 0.0, 1.0 - 0.1 * sum(k3) / 3, 0.0], [0.5, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(batch.batch["token_level_rewards"], expected)
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(sum(k3) / 3 / 2)


def test_empty_responses_do_not_count():
    batch, metrics = apply_kl_penalty(batch_of(mask=((1, 1, 1, 0), (0, 0, 0, 0))), fixed(0.1))
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5 / 3)
    _, metrics = apply_kl_penalty(batch_of(mask=((0, 0, 0, 0), (0, 0, 0, 0))), fixed(0.1))
    assert metrics["actor/reward_kl_penalty"] == 0.0


def test_the_adaptive_controller_changes_after_its_batch():
    controller = adaptive(0.1, target_kl=0.01, horizon=100)
    _, metrics = apply_kl_penalty(batch_of(), controller)
    assert metrics["actor/reward_kl_penalty_coeff"] == 0.1
    two_rows_with_clipped_error = 0.1 * (1 + 0.2 * 2 / 100)
    assert controller.value == pytest.approx(two_rows_with_clipped_error)


@pytest.mark.parametrize(
    ("current_kl", "error"), [(1.0, 0.2), (0.11, 0.1), (0.1, 0.0), (0.09, -0.1), (-5.0, -0.2)]
)
def test_the_adaptive_controller_follows_the_clipped_relative_error(current_kl, error):
    controller = adaptive(0.5, target_kl=0.1, horizon=1000)
    controller.update(current_kl, num_samples=64)
    assert controller.value == pytest.approx(0.5 * (1 + error * 64 / 1000))


def test_a_batch_larger_than_the_horizon_keeps_the_coefficient_positive():
    controller = adaptive(0.5, target_kl=0.1, horizon=100)
    controller.update(0.0, num_samples=750)  # in one step the factor would be -0.5
    assert controller.value == pytest.approx(0.5 * 0.8**7 * 0.9)


def test_a_batch_without_reference_log_probs_raises():
    controller = fixed(0.1)
    with pytest.raises(MissingColumnError, match="ref_log_prob.*the run has the role ref"):
        apply_kl_penalty(
            batch_of().select(["response_mask", "token_level_scores", "old_log_probs"]), controller
        )
