"""`compute_advantage` passes columns and settings by the names of an estimator's parameters."""

import numpy as np
import pytest
import torch

from tests.trainer.ppo.advantages.plain_python import INDEX, ROWS, WIDTH, batch_of
from trainer.ppo.advantage_inputs import compute_advantage
from trainer.ppo.advantages.estimators import (
    compute_gae_advantage_return,
    compute_grpo_outcome_advantage,
)
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from verl_like.errors import ConfigError, MissingColumnError


def test_settings_are_passed_by_name(columns):
    rewards, values, mask = columns
    batch = compute_advantage(batch_of(rewards, mask, values=values), "gae", gamma=0.9, lam=0.8)
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, 0.9, 0.8)
    assert torch.equal(batch.batch["advantages"], advantages)
    assert torch.equal(batch.batch["returns"], returns)
    batch = compute_advantage(batch, "grpo", norm_adv_by_std_in_grpo=False)
    expected, _ = compute_grpo_outcome_advantage(
        rewards, mask, INDEX, norm_adv_by_std_in_grpo=False
    )
    assert torch.equal(batch.batch["advantages"], expected)


def test_the_epsilon_of_the_deviation_is_trl_s(columns):
    rewards, _, mask = columns
    scores, group = rewards.sum(1), torch.from_numpy(INDEX == INDEX[0])
    batch = compute_advantage(batch_of(rewards, mask), "grpo", adv_epsilon=1e-4)
    # TRL 1.16, scale_rewards="group"
    expected = (scores[group] - scores[group].mean()) / (scores[group].std() + 1e-4)
    advantages = batch.batch["advantages"].sum(1)[group] / mask.sum(1)[group]
    torch.testing.assert_close(advantages, expected, rtol=1e-9, atol=0)


def test_a_users_estimator_is_found_by_its_dotted_path(columns, tmp_path, monkeypatch):
    (tmp_path / "my_estimators.py").write_text(
        "def halved(token_level_rewards, response_mask, bonus, scale=0.5, **rest):\n"
        "    result = token_level_rewards * scale + bonus * response_mask\n"
        "    return result, result\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rewards, _, mask = columns
    batch = batch_of(rewards, mask, bonus=torch.ones(ROWS, WIDTH, dtype=torch.float64))
    compute_advantage(batch, "my_estimators.halved")
    assert torch.equal(batch.batch["returns"], rewards / 2 + mask)


def test_a_missing_column_is_named_with_its_writer(columns):
    rewards, _, mask = columns
    with pytest.raises(MissingColumnError, match=r"'values' \(written by critic"):
        compute_advantage(batch_of(rewards, mask), "gae")
    with pytest.raises(MissingColumnError, match="reward_baselines"):
        compute_advantage(batch_of(rewards, mask), "remax")
    with pytest.raises(MissingColumnError, match="uid"):
        compute_advantage(batch_of(rewards, mask).select(non_tensor_batch_keys=[]), "grpo")


def test_a_users_estimator_is_found_by_the_name_of_its_decorator(columns, monkeypatch):
    monkeypatch.setattr(ADVANTAGE_ESTIMATORS, "_entries", dict(ADVANTAGE_ESTIMATORS))

    @ADVANTAGE_ESTIMATORS.register("doubled")
    def doubled(token_level_rewards):
        return 2 * token_level_rewards, token_level_rewards

    rewards, _, mask = columns
    batch = compute_advantage(batch_of(rewards, mask), "doubled")
    assert torch.equal(batch.batch["advantages"], 2 * rewards)


def test_an_unknown_reward_of_gdpo_is_rejected_with_the_known_rewards():
    mask = torch.ones(2, 1, dtype=torch.int64)
    batch = batch_of(torch.ones(2, 1), mask, token_level_scores=torch.ones(2, 1))
    batch.non_tensor_batch["reward_extra/format"] = np.array([1.0, 0.0])
    with pytest.raises(ConfigError, match="gdpo_reward_keys=fromat.*seq_reward, format.*'format'"):
        compute_advantage(batch, "gdpo", gdpo_reward_keys=["fromat"])
    batch = compute_advantage(batch, "gdpo", gdpo_reward_keys=["format"])
    torch.testing.assert_close(batch.batch["advantages"], torch.tensor([[0.5], [-0.5]]) * 2**0.5)
