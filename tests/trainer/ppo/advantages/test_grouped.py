"""Estimators that compare samples of one prompt: a group of one, and GDPO's separate rewards."""

import numpy as np
import pytest
import torch

from tests.trainer.ppo.advantages.plain_python import batch_of
from trainer.ppo.advantages.gdpo import compute_gdpo_outcome_advantage
from trainer.ppo.advantages.gpg import compute_gpg_outcome_advantage
from trainer.ppo.advantages.grpo import compute_grpo_outcome_advantage
from trainer.ppo.advantages.grpo_batch_std import compute_grpo_batch_std_outcome_advantage
from trainer.ppo.advantages.grpo_passk import compute_grpo_passk_outcome_advantage
from trainer.ppo.advantages.grpo_process import compute_grpo_process_advantage
from trainer.ppo.advantages.opo import compute_opo_outcome_advantage
from trainer.ppo.advantages.optimal_token_baseline import compute_optimal_token_baseline_advantage
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.advantages.rloo import compute_rloo_outcome_advantage
from trainer.ppo.compute_advantage import compute_advantage
from verl_like.errors import ConfigError

BY_SCORE = [
    compute_grpo_outcome_advantage,
    compute_grpo_batch_std_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_gpg_outcome_advantage,
]


def scores_at_the_end(scores, mask):
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(len(scores)), mask.sum(-1) - 1] = torch.tensor(scores)
    return rewards


@pytest.mark.parametrize("estimator", BY_SCORE)
def test_with_one_sample_per_prompt_the_raw_score_remains(estimator):
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    advantages, _ = estimator(scores_at_the_end([2.0, -3.0], mask), mask, ["x", "y"])
    assert advantages.tolist() == [[2.0, 2.0, 0.0], [-3.0, -3.0, -3.0]]


def test_gdpo_tells_apart_rewards_whose_sums_are_equal():
    # by group: a scores (1, 0) and (0, 1), b (1, 1) and (0, 0): GRPO's sums are 1, 1 | 2, 0
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.1], [1.0, 0.1], [0.0, 0.0]])
    mask = torch.tensor([[1, 0], [1, 1], [1, 1], [1, 0]])
    advantages, _ = compute_gdpo_outcome_advantage(
        rewards, mask, ["a", "a", "b", "b"], epsilon=0.0, whiten=False
    )
    root = 0.5**0.5
    expected = torch.tensor([[0.0, 0.0], [0.0, 0.0], [2 * root, 2 * root], [-2 * root, 0.0]])
    torch.testing.assert_close(advantages, expected)

    weighed, _ = compute_gdpo_outcome_advantage(
        rewards, mask, ["a", "a", "b", "b"], 0.0, gdpo_reward_weights=[3.0, 1.0], whiten=False
    )
    torch.testing.assert_close(weighed[:2, 0], torch.tensor([2 * root, -2 * root]))


def test_gdpo_leaves_a_sample_without_a_reward_at_its_groups_mean():
    rewards = torch.tensor([[1.0], [float("nan")], [3.0], [float("nan")]])
    mask = torch.ones(4, 1, dtype=torch.int64)
    advantages, _ = compute_gdpo_outcome_advantage(
        rewards, mask, ["a", "a", "a", "b"], norm_adv_by_std_in_grpo=False, whiten=False
    )
    assert advantages.flatten().tolist() == [-1.0, 0.0, 1.0, 0.0]


def test_a_reward_that_no_sample_has_is_refused_with_those_that_there_are():
    mask = torch.ones(2, 1, dtype=torch.int64)
    batch = batch_of(torch.ones(2, 1), mask, token_level_scores=torch.ones(2, 1))
    batch.non_tensor_batch["reward_extra/format"] = np.array([1.0, 0.0])
    with pytest.raises(ConfigError, match="gdpo_reward_keys=fromat.*seq_reward, format.*'format'"):
        compute_advantage(batch, "gdpo", gdpo_reward_keys=["fromat"])
    batch = compute_advantage(batch, "gdpo", gdpo_reward_keys=["format"])
    torch.testing.assert_close(batch.batch["advantages"], torch.tensor([[0.5], [-0.5]]) * 2**0.5)


@pytest.mark.parametrize(
    ("name", "settings", "first", "second"),
    [
        ("grpo", {}, 0.5**0.5, -(0.5**0.5)),  # mean 2, standard deviation (n - 1) the root of 2
        ("grpo", {"norm_adv_by_std_in_grpo": False}, 1.0, -1.0),
        ("rloo", {}, 2.0, -2.0),  # less the other's score
        ("opo", {}, 4 / 3, -2 / 3),  # less (2 * 3 + 4 * 1) / 6
        ("gpg", {}, 1.0, -1.0),  # both scores count, so the scale is 1
        ("grpo_passk", {"norm_adv_by_std_in_grpo": False}, 2.0, 0.0),  # the best less the next
    ],
)
def test_one_score_a_sample_on_two_rows_of_four_tokens_worked_by_hand(
    name, settings, first, second
):
    """Two samples of a prompt: two tokens that score 3, four that score 1."""
    rewards = torch.tensor([[1.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    advantages, _ = ADVANTAGE_ESTIMATORS[name](
        token_level_rewards=rewards, response_mask=mask, index=["x", "x"], **settings
    )
    expected = torch.tensor([[first] * 2 + [0.0] * 2, [second] * 4])
    torch.testing.assert_close(advantages, expected, rtol=1e-5, atol=1e-5)


def test_grpo_process_on_two_rows_of_four_tokens_worked_by_hand():
    scores = torch.tensor([[0.0, 1.0, 0.0, 0.0], [2.0, 0.0, 3.0, 9.0]])
    steps = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 1]])  # the first step of row 0 scores 0
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])
    advantages, _ = compute_grpo_process_advantage(
        scores, steps, mask, ["x", "x"], norm_adv_by_std_in_grpo=False
    )
    # the steps' scores are 0, 1, 2, 3, their mean is 1.5: -1.5, -0.5 | 0.5, 1.5
    assert advantages.tolist() == [[-2.0, -0.5, 0.0, 0.0], [2.0, 1.5, 1.5, 0.0]]


def test_the_optimal_token_baseline_on_two_rows_worked_by_hand():
    rewards = torch.tensor([[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 5.0]])
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 1]])
    half = torch.full((2, 4), 0.5).log()
    squares = torch.tensor([[0.5, 0.25, 9.0, 9.0], [0.25, 0.25, 9.0, 0.5]])
    # squared norms 0.5, 0.25 | 0.25, 0.25, 0.5; added up 0.5, 0.75 | 0.25, 0.5, 1.0
    advantages, returns = compute_optimal_token_baseline_advantage(
        rewards, half, squares, mask, ["x", "x"]
    )
    assert returns.tolist() == [[1.0, 1.0, 0.0, 0.0], [5.0, 5.0, 0.0, 5.0]]
    first, second = (0.5 * 1 + 0.25 * 5) / 0.75, (0.75 * 1 + 0.5 * 5) / 1.25
    expected = torch.tensor([[1 - first, 1 - second, 0, 0], [5 - first, 5 - second, 0, 0]])
    torch.testing.assert_close(advantages, expected)
