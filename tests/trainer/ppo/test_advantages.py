"""Every advantage estimator beside a twin that loops."""

import statistics

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.ppo.advantages import returns as returns_module
from trainer.ppo.advantages.gae import compute_gae_advantage_return
from trainer.ppo.advantages.grpo import compute_grpo_outcome_advantage
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.advantages.reinforce_plus_plus import (
    compute_reinforce_plus_plus_outcome_advantage,
)
from trainer.ppo.advantages.reinforce_plus_plus_baseline import (
    compute_reinforce_plus_plus_baseline_outcome_advantage,
)
from trainer.ppo.advantages.remax import compute_remax_outcome_advantage
from trainer.ppo.advantages.rloo import compute_rloo_outcome_advantage
from trainer.ppo.compute_advantage import compute_advantage
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError, MissingColumnError

ROWS, WIDTH = 7, 6
INDEX = np.array(["a", "b", "a", "c", "b", "a", "b"], dtype=object)  # three samples, three, and one


@pytest.fixture(params=["full and short rows", "rows with holes"])
def mask(request):
    """Rows of 6, 4, 1, 0, 6, 3 and 2 tokens."""
    mask = (torch.arange(WIDTH) < torch.tensor([[6], [4], [1], [0], [6], [3], [2]])).to(torch.int64)
    if request.param == "rows with holes":
        mask[0, 1:3] = 0
        mask[4, 0] = 0
        mask[5] = torch.tensor([0, 1, 0, 1, 1, 0])
    return mask


@pytest.fixture
def columns(mask):
    torch.manual_seed(0)
    rewards, values = torch.randn(2, ROWS, WIDTH, dtype=torch.float64)
    return rewards * mask, values, mask  # values outside the mask are garbage


def positions(row):
    return [t for t in range(WIDTH) if row[t]]


def whitened(advantages, mask):
    inside = [advantages[row, t].item() for row in range(ROWS) for t in positions(mask[row])]
    mean, std = statistics.mean(inside), statistics.stdev(inside)
    return torch.where(mask.bool(), (advantages - mean) / std, 0)


def naive_gae(rewards, values, mask, gamma, lam):
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for row in range(ROWS):
        next_value = next_advantage = 0.0
        for t in reversed(positions(mask[row])):
            delta = rewards[row, t] + gamma * next_value - values[row, t]
            next_advantage = delta + gamma * lam * next_advantage
            next_value = values[row, t]
            advantages[row, t], returns[row, t] = next_advantage, next_advantage + next_value
    return advantages, returns


def naive_groups(scores):
    """For each row: the scores of its group, and of the group's others."""
    for row in range(ROWS):
        yield (
            [scores[other].item() for other in range(ROWS) if INDEX[other] == INDEX[row]],
            [
                scores[other].item()
                for other in range(ROWS)
                if INDEX[other] == INDEX[row] and other != row
            ],
        )


def spread(scores, mask):
    return torch.tensor(scores, dtype=torch.float64).unsqueeze(-1) * mask


@pytest.mark.parametrize("block", [2, 3, 64])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 0.8), (0.99, 0.0), (0.0, 1.0)])
def test_gae_equals_the_backward_recursion(columns, gamma, lam, block, monkeypatch):
    monkeypatch.setattr(returns_module, "BLOCK", block)
    rewards, values, mask = columns
    expected, expected_returns = naive_gae(rewards, values, mask, gamma, lam)
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, gamma, lam)
    torch.testing.assert_close(returns, expected_returns)
    torch.testing.assert_close(advantages, whitened(expected, mask))


def test_gae_on_four_tokens_worked_by_hand():
    rewards, values = torch.tensor([[0.0, 0.0, 1.0, 0.0]]), torch.tensor([[0.5, 0.25, 0.5, 9.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    # deltas 0 + .25 - .5, 0 + .5 - .25, 1 - .5; advantages .5 | .25 + .5 * .5 | -.25 + .5 * .5
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, 1.0, 0.5)
    assert returns.tolist() == [[0.5, 0.75, 1.0, 0.0]]
    torch.testing.assert_close(advantages, torch.tensor([[-1.0, 0.5, 0.5, 0.0]]) / 0.75**0.5)


def test_long_rows_of_float32_match_the_recursion_in_float64():
    torch.manual_seed(0)
    rewards, values = torch.randn(2, 3, 500)
    mask = torch.ones(3, 500, dtype=torch.int64)
    _, returns = compute_gae_advantage_return(rewards, values, mask, 1.0, 1.0)
    expected = rewards.double().flip(-1).cumsum(-1).flip(-1)
    torch.testing.assert_close(returns.double(), expected, rtol=1e-5, atol=1e-4)


class CountOperations(TorchDispatchMode):
    """Counts the tensor operations run inside it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_gae_loops_over_blocks_of_tokens_and_never_over_rows():
    counts = {}
    for rows, width in ((2, 512), (64, 512), (2, 1024)):
        rewards, values = torch.randn(2, rows, width)
        with CountOperations() as operations:
            compute_gae_advantage_return(
                rewards, values, torch.ones(rows, width, dtype=torch.int64), 1.0, 0.95
            )
        counts[rows, width] = operations.count
    assert counts[2, 512] == counts[64, 512]
    assert counts[2, 1024] - counts[2, 512] <= 10 * 512 // returns_module.BLOCK


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


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_equals_discounted_returns_whitened(columns, gamma):
    rewards, _, mask = columns
    expected = torch.zeros_like(rewards)
    for row in range(ROWS):
        running = 0.0
        for t in reversed(positions(mask[row])):
            running = rewards[row, t] + gamma * running
            expected[row, t] = running
    advantages, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma)
    torch.testing.assert_close(returns, expected)
    torch.testing.assert_close(advantages, whitened(expected, mask))


def test_reinforce_plus_plus_baseline_equals_centred_scores_whitened(columns):
    rewards, _, mask = columns
    scores = rewards.sum(-1)
    centered = [
        score - (statistics.mean(group) if others else 0.0)
        for score, (group, others) in zip(scores.tolist(), naive_groups(scores), strict=True)
    ]
    advantages, _ = compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, INDEX)
    torch.testing.assert_close(advantages, whitened(spread(centered, mask), mask))


def test_remax_equals_returns_less_the_baseline(columns):
    rewards, _, mask = columns
    baselines = torch.randn(ROWS, dtype=torch.float64)
    advantages, returns = compute_remax_outcome_advantage(rewards, baselines, mask)
    for row in range(ROWS):
        for t in range(WIDTH):
            expected = rewards[row, t:].sum() * mask[row, t]
            torch.testing.assert_close(returns[row, t], expected)
            torch.testing.assert_close(advantages[row, t], expected - baselines[row] * mask[row, t])


# ------------------------------------------------------------------------- edges of every estimator

GROUPED = [compute_grpo_outcome_advantage, compute_rloo_outcome_advantage]


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


def batch_of(rewards, mask, **more):
    tensors = {"token_level_rewards": rewards, "response_mask": mask, **more}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": INDEX[: len(mask)]})


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_empty_responses_give_zeros(name):
    mask = torch.zeros(ROWS, WIDTH, dtype=torch.int64)
    zeros = torch.zeros(ROWS, WIDTH)
    batch = batch_of(
        zeros, mask, values=torch.randn(ROWS, WIDTH), reward_baselines=torch.ones(ROWS)
    )
    batch = compute_advantage(batch, name)
    assert torch.equal(batch.batch["advantages"], zeros)
    assert torch.equal(batch.batch["returns"], zeros)


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_every_estimator_leaves_its_inputs_alone_and_works_on_float32(columns, name):
    rewards, values, mask = columns
    inputs = {"values": values.float(), "reward_baselines": torch.ones(ROWS)}
    batch = batch_of(rewards.float(), mask, **inputs)
    before = {key: batch.batch[key].clone() for key in batch.batch.keys()}  # noqa: SIM118
    compute_advantage(batch, name)
    assert all(torch.equal(batch.batch[key], column) for key, column in before.items())
    assert batch.batch["advantages"].dtype == batch.batch["returns"].dtype == torch.float32
    assert (batch.batch["advantages"][mask == 0] == 0).all()


# -------------------------------------------------------------------------------- compute_advantage


def test_compute_advantage_passes_the_settings_by_name(columns):
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


def test_a_users_estimator_is_reached_by_its_dotted_path(columns, tmp_path, monkeypatch):
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


def test_an_unknown_estimator_is_refused_with_the_list(columns):
    rewards, _, mask = columns
    with pytest.raises(
        ConfigError, match=r"unknown advantage estimator 'gra'; there are gae, grpo"
    ):
        compute_advantage(batch_of(rewards, mask), "gra")


def test_a_users_estimator_is_found_by_the_name_of_its_decorator(columns, monkeypatch):
    monkeypatch.setattr(ADVANTAGE_ESTIMATORS, "_entries", dict(ADVANTAGE_ESTIMATORS))

    @ADVANTAGE_ESTIMATORS.register("doubled")
    def doubled(token_level_rewards):
        return 2 * token_level_rewards, token_level_rewards

    rewards, _, mask = columns
    batch = compute_advantage(batch_of(rewards, mask), "doubled")
    assert torch.equal(batch.batch["advantages"], 2 * rewards)


def test_every_estimator_is_a_file_of_its_name():
    for name, estimator in ADVANTAGE_ESTIMATORS.items():
        assert estimator.__module__ == f"trainer.ppo.advantages.{name}"
