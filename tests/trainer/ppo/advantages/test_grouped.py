"""Every estimator that compares samples of one prompt, beside a loop over groups."""

import statistics

import pytest
import torch

from tests.trainer.ppo.advantages.plain_python import INDEX, ROWS, naive_groups, spread, whitened
from trainer.ppo.advantages.gpg import compute_gpg_outcome_advantage
from trainer.ppo.advantages.grpo import compute_grpo_outcome_advantage
from trainer.ppo.advantages.grpo_batch_std import compute_grpo_batch_std_outcome_advantage
from trainer.ppo.advantages.grpo_passk import compute_grpo_passk_outcome_advantage
from trainer.ppo.advantages.opo import compute_opo_outcome_advantage
from trainer.ppo.advantages.reinforce_plus_plus_baseline import (
    compute_reinforce_plus_plus_baseline_outcome_advantage,
)
from trainer.ppo.advantages.rloo import compute_rloo_outcome_advantage


@pytest.mark.parametrize("normalise", [True, False])
def test_grpo_equals_the_loop_over_groups(columns, normalise):
    rewards, _, mask = columns
    scores = rewards.sum(-1)
    expected = []
    for score, (group, others) in zip(scores.tolist(), naive_groups(scores), strict=True):
        if not others:
            expected.append(score)
        else:
            centered = score - statistics.mean(group)
            expected.append(centered / (statistics.stdev(group) + 1e-6) if normalise else centered)
    advantages, returns = compute_grpo_outcome_advantage(
        rewards, mask, INDEX, norm_adv_by_std_in_grpo=normalise
    )
    torch.testing.assert_close(advantages, spread(expected, mask))
    torch.testing.assert_close(returns, advantages)


def test_rloo_equals_the_loop_over_groups(columns):
    rewards, _, mask = columns
    scores = rewards.sum(-1)
    expected = [
        score - (statistics.mean(others) if others else 0.0)
        for score, (_, others) in zip(scores.tolist(), naive_groups(scores), strict=True)
    ]
    advantages, _ = compute_rloo_outcome_advantage(rewards, mask, INDEX)
    torch.testing.assert_close(advantages, spread(expected, mask))


def test_reinforce_plus_plus_baseline_equals_centred_scores_whitened(columns):
    rewards, _, mask = columns
    scores = rewards.sum(-1)
    centered = [
        score - (statistics.mean(group) if others else 0.0)
        for score, (group, others) in zip(scores.tolist(), naive_groups(scores), strict=True)
    ]
    advantages, _ = compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, INDEX)
    torch.testing.assert_close(advantages, whitened(spread(centered, mask), mask))


def test_opo_equals_the_loop_over_groups(columns):
    rewards, _, mask = columns
    scores, lengths = rewards.sum(-1).tolist(), mask.sum(-1).tolist()
    expected = []
    for row in range(ROWS):
        group = [other for other in range(ROWS) if INDEX[other] == INDEX[row]]
        weighed = sum(lengths[other] * scores[other] for other in group)
        baseline = weighed / sum(lengths[other] for other in group) if len(group) > 1 else 0.0
        expected.append(scores[row] - baseline)
    advantages, returns = compute_opo_outcome_advantage(rewards, mask, INDEX)
    torch.testing.assert_close(advantages, spread(expected, mask))
    torch.testing.assert_close(returns, advantages)


def test_gpg_equals_the_loop_over_groups(columns):
    rewards, _, mask = columns
    rewards[0] = 0.0
    scores = rewards.sum(-1)
    scale = ROWS / sum(score != 0 for score in scores.tolist())
    assert scale > 1
    expected = [
        scale * (score - (statistics.mean(group) if others else 0.0))
        for score, (group, others) in zip(scores.tolist(), naive_groups(scores), strict=True)
    ]
    advantages, _ = compute_gpg_outcome_advantage(rewards, mask, INDEX)
    torch.testing.assert_close(advantages, spread(expected, mask))


@pytest.mark.parametrize("normalise", [True, False])
def test_grpo_passk_equals_the_loop_over_groups(columns, normalise):
    rewards, _, mask = columns
    scores = rewards.sum(-1)
    expected = []
    for score, (group, others) in zip(scores.tolist(), naive_groups(scores), strict=True):
        if not others:
            expected.append(score)
        elif score < max(group):
            expected.append(0.0)
        else:
            scale = statistics.stdev(group) + 1e-6 if normalise else 1.0
            expected.append((score - max(others)) / scale)
    advantages, _ = compute_grpo_passk_outcome_advantage(
        rewards, mask, INDEX, norm_adv_by_std_in_grpo=normalise
    )
    torch.testing.assert_close(advantages, spread(expected, mask))


def test_grpo_batch_std_equals_the_loop_over_groups(columns):
    rewards, _, mask = columns
    scores = rewards.sum(-1)
    std = statistics.stdev(scores.tolist()) + 1e-6
    expected = [
        (score - statistics.mean(group)) / std if others else score
        for score, (group, others) in zip(scores.tolist(), naive_groups(scores), strict=True)
    ]
    advantages, _ = compute_grpo_batch_std_outcome_advantage(rewards, mask, INDEX)
    torch.testing.assert_close(advantages, spread(expected, mask))


GROUPED = [
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


@pytest.mark.parametrize(
    "estimator", [*GROUPED, compute_reinforce_plus_plus_baseline_outcome_advantage]
)
@pytest.mark.parametrize("score", [0.1, 1 / 3, 1e6 + 0.1])
def test_groups_of_equal_scores_give_exactly_zero(estimator, score):
    mask = torch.ones(6, 3, dtype=torch.int64)
    advantages, _ = estimator(
        scores_at_the_end([score] * 6, mask), mask, ["x", "y", "x", "y", "x", "x"]
    )
    assert (advantages == 0).all()


@pytest.mark.parametrize("estimator", GROUPED)
def test_with_one_sample_per_prompt_the_raw_score_remains(estimator):
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    advantages, _ = estimator(scores_at_the_end([2.0, -3.0], mask), mask, ["x", "y"])
    assert advantages.tolist() == [[2.0, 2.0, 0.0], [-3.0, -3.0, -3.0]]
