"""Bugs of other projects, each from a public thread, planted in a small loss: all are named.

Each mutant is written from the thread's description; no project's code is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.tools.check_loss.stand_ins import few_batches
from trainer.tools.check_loss import BrokenRelation, check_loss
from workers.losses.aggregate import agg_loss

Mutant = Callable[..., Any]
MUTANTS: list[tuple[str, str, Mutant, dict[str, Any]]] = []
"""(thread, the relation that it breaks, the mutant, settings of the check)."""


def mutant(thread: str, relation: str, **settings: Any) -> Callable[[Mutant], Mutant]:
    def register(function: Mutant) -> Mutant:
        MUTANTS.append((thread, relation, function, settings))
        return function

    return register


def surrogate(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """PPO's clipped surrogate per token; zero outside the mask, whatever the inputs are there."""
    log_ratio = (log_prob - old_log_prob).where(mask > 0, 0).clamp(-20, 20)
    advantages = advantages.where(mask > 0, 0)
    free, clipped = log_ratio.exp(), log_ratio.exp().clamp(0.8, 1.2)
    return torch.maximum(-advantages * free, -advantages * clipped)


@mutant("verl#906", "micro_batch_cut")
def share_of_rows(log_prob, old_log_prob, advantages, mask, global_batch_size):
    """A token mean of the micro-batch, weighted by its share of the mini-batch's rows."""
    losses = surrogate(log_prob, old_log_prob, advantages, mask)
    return losses.sum() / mask.sum().clamp(1) * mask.any(1).sum() / max(global_batch_size, 1)


@mutant("verl#7200", "micro_batch_cut")
def no_counts_of_the_mini_batch(log_prob, response_mask, loss_agg_mode="token-mean"):
    """Distillation whose aggregation does not get the counts of the mini-batch."""
    return agg_loss(-log_prob, response_mask, loss_agg_mode)


@mutant("AReaL#1273", "micro_batch_cut")
def divided_once_more(log_prob, mask, batch_num_tokens, num_micro_batches):
    """A loss that is normalized over the mini-batch, and divided again by the pipeline."""
    return -log_prob.where(mask > 0, 0).sum() / max(batch_num_tokens, 1) / num_micro_batches


@mutant("verl#5798", "data_parallel_split", loss_agg_mode="seq-mean-token-mean")
def multiplied_denominator(log_prob, mask, global_batch_size, dp_size):
    """The number of rows is multiplied by the number of ranks, not divided."""
    rows = log_prob.where(mask > 0, 0).sum(1) / mask.sum(1).clamp(1)
    return -rows.sum() / max(global_batch_size * dp_size, 1)


@mutant("maxtext#4025", "declared_aggregation", loss_agg_mode="token-mean")
def default_of_another_stack(log_prob, mask, global_batch_size):
    """The recipe sets token-mean, but the layer below uses the mean over sequences."""
    counts = {"global_batch_size": global_batch_size}
    return agg_loss(-log_prob, mask, "seq-mean-token-mean", **counts)


@mutant("verl#3741", "padding_width", loss_agg_mode="seq-mean-token-sum-norm")
def divided_by_the_width(log_prob, mask, global_batch_size):
    """Dr. GRPO's constant is the padded width of this batch."""
    total = -log_prob.where(mask > 0, 0).sum() / max(global_batch_size, 1)
    return total / mask.shape[1]


@mutant("ROLL#444", "prompt_tokens")
def unmasked_numerator(log_prob, mask, batch_num_tokens):
    """Tokens inside the mask are counted, but all tokens are summed."""
    return -log_prob.sum() / max(batch_num_tokens, 1)


@mutant("RAGEN#71", "prompt_tokens")
def inverted_mask(log_prob, mask, batch_num_tokens):
    """Tokens of the environment are learned instead of the policy's."""
    return -log_prob.where(mask == 0, 0).sum() / max(batch_num_tokens, 1)


@mutant("OpenRLHF#973", "every_token")
def first_token_lost(log_prob, mask, batch_num_tokens):
    """The mask starts one position late, so the first token of a response is not learned."""
    late = mask * torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return -log_prob.where(late > 0, 0).sum() / max(batch_num_tokens, 1)


@mutant("mlx-lm-lora#55", "every_token")
def no_policy_gradient(log_prob, old_log_prob, advantages, mask, batch_num_tokens):
    """The ratio compares a policy with itself: it has a graph, and a slope of zero."""
    ratio = (log_prob - log_prob).exp()
    return (-advantages * ratio).where(mask > 0, 0).sum() / max(batch_num_tokens, 1)


@mutant("SkyRL#1633", "nan_outside")
def kl_times_mask(log_prob, ref_log_prob, mask, batch_num_tokens):
    """0 * NaN is NaN: a KL that is multiplied by the mask."""
    log_ratio = (ref_log_prob - log_prob).clamp(-20, 20)
    return ((log_ratio.exp() - 1 - log_ratio + log_ratio**2) * mask - log_prob * mask).sum() / max(
        batch_num_tokens, 1
    )


@mutant("OpenRLHF#1293", "extreme_ratios")
def unclamped_sequence_ratio(log_prob, old_log_prob, advantages, mask, global_batch_size):
    """GSPO's clamp is computed and not used."""
    mean = (log_prob - old_log_prob).where(mask > 0, 0).sum(1) / mask.sum(1).clamp(1)
    ratio, advantage = mean.exp(), advantages.where(mask > 0, 0).sum(1) / mask.sum(1).clamp(1)
    losses = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
    return losses.sum() / max(global_batch_size, 1)


@mutant("TRL#3248", "all_masked")
def no_token_left(log_prob, mask, batch_num_tokens):
    """All completions were truncated, and the count of tokens is not clamped."""
    return -log_prob.where(mask > 0, 0).sum() / torch.tensor(batch_num_tokens)


@mutant("RRHF#37", "no_side_effects")
def mask_written(log_prob, mask, batch_num_tokens):
    """The argument with the response mask is overwritten."""
    loss = -log_prob.where(mask > 0, 0).sum() / max(batch_num_tokens, 1)
    mask[mask == 0] = 1
    return loss


@mutant("TRL#1380", "micro_batch_cut", kind="preference")
def kl_of_the_micro_batch(log_probs, ref_log_probs, desirable, beta):
    """KTO's KL is estimated from the rows of the micro-batch."""
    above = log_probs - ref_log_probs
    kl = above.detach().mean().clamp(min=0)
    return torch.sigmoid(beta * (kl - above) * (2 * desirable - 1))


@mutant("AReaL#1419", "row_permutation")
def groups_by_stride(token_level_rewards, response_mask, index):
    """Groups are taken by position, two rows each, independent of their prompts."""
    scores = token_level_rewards.sum(1)
    mean = torch.stack([scores[i - i % 2 : i - i % 2 + 2].mean() for i in range(len(scores))])
    advantages = (scores - mean)[:, None] * response_mask
    return advantages, advantages


@mutant("grpo-flat#2", "reward_scale_and_shift")
def one_group(token_level_rewards, response_mask, index):
    """The baseline is the mean of the whole batch."""
    scores = token_level_rewards.sum(1)
    advantages = (scores - scores.mean())[:, None] * response_mask
    return advantages, advantages


@mutant("TRL#5773", "group_size_one")
def std_of_one(token_level_rewards, response_mask, index):
    """The standard deviation of a group's only reward is NaN, and so is its advantage."""
    scores, uids = token_level_rewards.sum(1), list(index)
    groups = [[i for i, uid in enumerate(uids) if uid == mine] for mine in uids]
    mean = torch.stack([scores[rows].mean() for rows in groups])
    std = torch.stack([scores[rows].std() for rows in groups])
    advantages = ((scores - mean) / (std + 1e-4))[:, None].where(response_mask > 0, 0)
    return advantages, advantages


@mutant("miles#1827", "holes_in_the_mask")
def steps_at_observations(token_level_rewards, values, response_mask, gamma, lam):
    """GAE takes a step at every position, including observations."""
    inside, gamma = response_mask.double(), 0.9
    values, advantages, later, following = values * inside, [], 0.0, 0.0
    for t in reversed(range(values.shape[1])):
        error = token_level_rewards[:, t] + gamma * following - values[:, t]
        later = error + gamma * lam * later
        following = values[:, t]
        advantages.append(later * inside[:, t])
    column = torch.stack(advantages[::-1], dim=1)
    return column, column


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize(
    ("thread", "relation", "function", "settings"), MUTANTS, ids=[row[0] for row in MUTANTS]
)
def test_a_published_bug_breaks_its_relation(
    thread: str,
    relation: str,
    function: Mutant,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few_batches(monkeypatch)
    with pytest.raises(BrokenRelation) as caught:
        check_loss(function, **settings)
    assert caught.value.relation == relation
    assert f"{function.__name__}" in str(caught.value)
    assert "Likely cause: " in str(caught.value)
