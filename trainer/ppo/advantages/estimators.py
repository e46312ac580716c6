"""Advantage estimators: GAE, GRPO, REINFORCE++, RLOO and their relatives, each with its source.

- GAE needs a critic; it is the estimator of the PPO paper.
- GRPO and its relatives compare the samples of a prompt; RLOO, OPO and GPG do so without a standard
  deviation.
- OTB has a baseline per token that minimizes the gradient's variance.
- REINFORCE with other baselines: REINFORCE++ (whitening), ReMax (greedy), ColossalChat (critic).

Tensors are [rows, R], `index` is [rows]. `truncated` is [rows], a bool. Advantages and returns are
zero outside the mask. In `Groups`, samples that share a prompt, `scores`, `weights` and `centered`
are [rows]; a group's number is its place in `Groups.size`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS, kl_belongs_in_loss
from verl_like.tensor_ops import zero_outside

Index = Sequence[Any] | np.ndarray


@ADVANTAGE_ESTIMATORS.register("gae")
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam: float,
    truncated: Tensor | None = None,
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """The sum of the TD errors from each token on, discounted by `gamma * lam`, then whitened.

    The TD error at token t is `reward[t] + gamma * value[t + 1] - value[t]`. After the last token,
    the value is 0; in a truncated row, with `bootstrap_truncated`, it is the value at the last
    token. The returns are the unwhitened advantages plus the values.

    Watch: If `critic/vf_explained_var` is near or below 0, set `trainer.critic_warmup`, or raise
    the critic's learning rate.

    Source: arXiv 1506.02438
    """
    inside = (response_mask != 0).to(values.dtype)
    order = order_inside_first(response_mask)
    values = zero_outside(values, response_mask)
    ordered_values = put_in_order(values, order)

    errors = put_in_order(inside.mul_(token_level_rewards), order).sub_(ordered_values)
    errors[:, :-1].add_(ordered_values[:, 1:], alpha=gamma)
    if truncated is not None:
        lengths = torch.count_nonzero(response_mask, dim=-1)
        rows = (truncated & (lengths > 0)).nonzero().squeeze(-1)
        last = lengths[rows] - 1
        errors[rows, last] += gamma * ordered_values[rows, last]

    advantages = put_back(discounted_sum(errors, gamma * lam), order)
    del errors, inside  # frees memory before whitening allocates
    returns = values.add_(advantages)
    if whiten:
        advantages = whiten_(advantages, response_mask)
    return advantages, returns


@ADVANTAGE_ESTIMATORS.register("grpo", "grpo_vectorized")
@kl_belongs_in_loss
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """The score minus the group's mean, divided by the group's standard deviation.

    With `norm_adv_by_std_in_grpo=false`, there is no division, as in Dr. GRPO.

        scores, mask = torch.tensor([1.0, 0.0]), torch.ones(2, 3, dtype=torch.int64)
        rewards = place_at_last_token(scores, mask)
        advantages, _ = compute_grpo_outcome_advantage(rewards, mask, index=["a", "a"])

    Args:
        token_level_rewards: [rows, R]; their sum is the row's score.
        response_mask: [rows, R]; 1 at the tokens of the response.
        index: the group of each row, such as the uid of its prompt.
        epsilon: is added to the standard deviation, so that it is never 0.
        norm_adv_by_std_in_grpo: divide by the standard deviation.

    Watch: If `actor/grad_norm` falls to 0 before `critic/score/mean` is at its best, most groups
    have equal scores: set `algorithm.filter_groups.enable`. If `response_length/mean` grows while
    the score does not, use the preset `dr_grpo`.

    Source: GRPO, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783
    """
    scores = sequence_scores(token_level_rewards)
    groups = Groups.of(index, scores)
    centered = groups.centered(scores)
    if norm_adv_by_std_in_grpo:
        centered = groups.normalized(centered, epsilon)
    advantages = on_tokens(centered, response_mask)
    return advantages, advantages


@ADVANTAGE_ESTIMATORS.register("grpo_batch_std")
@kl_belongs_in_loss
@torch.no_grad()
def compute_grpo_batch_std_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """The score minus the group's mean, divided by the standard deviation of the batch's scores.

    The small differences in a group of nearly equal scores are not amplified.

    Watch: If `critic/advantages/min` sinks while the score nears its limit, a few bad samples
    dominate: use harder prompts.

    Source: Lite PPO, arXiv 2508.08221, section 4
    """
    scores = sequence_scores(token_level_rewards)
    groups = Groups.of(index, scores)
    centered = groups.centered(scores)

    from_mean = scores - scores.mean()
    variance = from_mean.square().sum() / max(len(scores) - 1, 1)
    normalized = centered / (variance.sqrt() + epsilon)
    advantages = torch.where(groups.size_of_row() > 1, normalized, centered)
    advantages = on_tokens(advantages, response_mask)
    return advantages, advantages


@ADVANTAGE_ESTIMATORS.register("grpo_passk")
@kl_belongs_in_loss
@torch.no_grad()
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """The best sample's lead over the second best of its group; 0 for all other samples.

    The lead is divided by the group's standard deviation, unless `norm_adv_by_std_in_grpo=false`. A
    tie for the best score gives 0. A group of one sample keeps its raw score.

    Watch: If `actor/grad_norm` is near 0, the best samples tie. If `actor/entropy` falls, it may be
    because no advantage is negative. Use `grpo` in both cases.

    Source: arXiv 2503.19595
    """
    scores = sequence_scores(token_level_rewards)
    groups = Groups.of(index, scores)
    best, second = _two_best(scores, groups)
    lead = scores[best] - scores[second]
    if norm_adv_by_std_in_grpo:
        lead = lead / (groups.std(groups.centered(scores))[best] + epsilon)

    advantages = torch.zeros_like(scores)
    advantages[best] = torch.where(best == second, scores[best], lead)
    advantages = on_tokens(advantages, response_mask)
    return advantages, advantages


def _two_best(scores: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Return each group's best and second-best row, which are the same in a group of one."""
    by_score = scores.argsort(descending=True, stable=True)
    by_group = by_score[groups.of_row[by_score].argsort(stable=True)]
    sizes = groups.size.to(torch.int64)
    start = sizes.cumsum(0) - sizes
    return by_group[start], by_group[start + (sizes > 1)]


@ADVANTAGE_ESTIMATORS.register("gdpo")
@torch.no_grad()
def compute_gdpo_outcome_advantage(
    named_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    gdpo_reward_weights: Sequence[float] | None = None,
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """The weighted sum of the GRPO advantages of each reward, then whitened.

    A missing reward (nan) counts as the mean of its group's other rewards. A group of one sample
    keeps its raw rewards.

    Watch: If `reward/<name>/mean` stays flat while others rise, raise the weight of that reward, or
    drop it.

    Source: arXiv 2601.05242
    """
    groups = Groups.of(index, named_rewards[:, 0])
    weights = [1.0] * named_rewards.shape[1] if gdpo_reward_weights is None else gdpo_reward_weights

    total = torch.zeros_like(named_rewards[:, 0])
    for rewards, weight in zip(named_rewards.unbind(dim=1), weights, strict=True):
        centered = groups.centered(_without_gaps(rewards, groups))
        if norm_adv_by_std_in_grpo:
            centered = groups.normalized(centered, epsilon)
        total.add_(centered, alpha=weight)

    advantages = on_tokens(total, response_mask)
    if whiten:
        advantages = whiten_(advantages, response_mask)
    return advantages, advantages


def _without_gaps(rewards: Tensor, groups: Groups) -> Tensor:
    """Replace nan rewards with the mean of the group's other rewards, or with 0 if all are nan."""
    known = ~rewards.isnan()
    lowest = groups.lowest(torch.where(known, rewards, torch.inf))
    lowest = torch.where(lowest.isinf(), 0, lowest)

    above_lowest = torch.where(known, rewards - lowest, 0)
    count = groups.sum(known.to(rewards.dtype)).clamp(min=1)
    mean = lowest + (groups.sum(above_lowest) / count)[groups.of_row]
    return torch.where(known, rewards, mean)


@ADVANTAGE_ESTIMATORS.register("grpo_process")
@torch.no_grad()
def compute_grpo_process_advantage(
    token_level_scores: Tensor,
    step_ends: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """The sum of the normalized scores of a token's step and all later steps.

    Mean and standard deviation (n - 1) are over all steps of the prompt's samples;
    `norm_adv_by_std_in_grpo=false` subtracts only the mean. `step_ends` marks the last token of
    each step. If the policy chooses its number of steps, this estimator is biased; `rloo_process`
    is not.

    Watch: If `critic/advantages/max` and `response_length/mean` both rise, the policy gains by
    making more steps: use `rloo_process`.

    Source: GRPO with process supervision, arXiv 2402.03300, section 4.1.3
    """
    rows, places = (step_ends.bool() & response_mask.bool()).nonzero(as_tuple=True)
    scores = token_level_scores[rows, places]

    groups = Groups.of(index, token_level_scores[:, 0])
    steps = Groups(groups.of_row[rows], torch.bincount(groups.of_row[rows]).to(scores.dtype))
    centered = steps.centered(scores)
    if norm_adv_by_std_in_grpo:
        centered = steps.normalized(centered, epsilon)

    normalized = torch.zeros_like(token_level_scores)
    normalized[rows, places] = centered
    order = order_inside_first(response_mask)
    later = discounted_sum(put_in_order(normalized, order), 1.0)
    advantages = put_back(later, order).masked_fill_(response_mask == 0, 0)
    return advantages, advantages


@ADVANTAGE_ESTIMATORS.register("optimal_token_baseline", "tir_optimal_token_baseline")
@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    response_mask: Tensor,
    index: Index,
) -> tuple[Tensor, Tensor]:
    """The return G of token t minus the W-weighted mean of G over the t-th tokens of its group.

    W is the sum over the tokens so far of `1 - 2 p + sum(p^2 over the vocabulary)`: the squared
    norm of the gradient of log p with respect to the logits, without importance weights. t counts
    only tokens inside the mask. A token that only one of several samples reaches gets 0 (in verl,
    its raw return). A group of one sample keeps its raw returns.

    Watch: If `actor/grad_norm` is not lower and steadier than with `rloo` or `grpo`, W is nearly
    equal for all samples: use one of those two.

    Source: arXiv 2602.07078
    """
    groups = Groups.of(index, token_level_rewards[:, 0])
    order = order_inside_first(response_mask)
    returns = put_in_order(discounted_returns(token_level_rewards, response_mask, 1.0), order)
    lead = returns - _lowest_score(returns, groups)

    columns = (old_log_probs, sum_pi_squared, response_mask.bool())
    weights = _weights(*(put_in_order(column, order) for column in columns))
    total = returns.new_zeros(len(groups.size), returns.shape[1])
    weighted = torch.zeros_like(total)
    total.index_add_(0, groups.of_row, weights)
    weighted.index_add_(0, groups.of_row, weights * lead)
    mean = weighted / total.masked_fill(total == 0, 1)
    mean[groups.size == 1] = 0  # a group of one keeps its returns

    advantages = put_back(lead - mean[groups.of_row], order)
    return zero_outside(advantages, response_mask), put_back(returns, order)


def _weights(old_log_probs: Tensor, sum_pi_squared: Tensor, mask: Tensor) -> Tensor:
    """Return W for every token of ordered rows, and 0 outside the mask."""
    norms = (1 - 2 * old_log_probs.exp() + sum_pi_squared).clamp(min=0)
    # values outside the mask come after a row's tokens, so no token's sum includes them
    return zero_outside(norms.cumsum(dim=-1), mask)


def _lowest_score(ordered_returns: Tensor, groups: Groups) -> Tensor:
    """Return the lowest score of each row's group, [rows, 1].

    Subtracting it first gives exactly zero for equal scores. It is 0 in a group of one. A row's
    score is the return of its first token.
    """
    lowest = groups.lowest(ordered_returns[:, 0])
    return torch.where(groups.size_of_row() > 1, lowest, 0).unsqueeze(-1)


@ADVANTAGE_ESTIMATORS.register("reinforce_plus_plus")
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0, whiten: bool = True
) -> tuple[Tensor, Tensor]:
    """The token's discounted return, whitened.

    Watch: If `critic/score/mean` stays flat while `actor/grad_norm` does not fall, use
    `reinforce_plus_plus_baseline` with `rollout.n` above 1.

    Source: arXiv 2501.03262
    """
    returns = discounted_returns(token_level_rewards, response_mask, gamma)
    advantages = returns.clone()
    if whiten:
        advantages = whiten_(advantages, response_mask)
    return advantages, returns


@ADVANTAGE_ESTIMATORS.register("reinforce_plus_plus_baseline")
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index, whiten: bool = True
) -> tuple[Tensor, Tensor]:
    """The score minus the group's mean, whitened.

    Watch: If `critic/advantages/max`, in standard deviations, is large, most groups have equal
    scores: set `algorithm.filter_groups.enable`.

    Source: arXiv 2501.03262
    """
    scores = sequence_scores(token_level_rewards)
    centered = Groups.of(index, scores).centered(scores)
    advantages = on_tokens(centered, response_mask)
    if whiten:
        advantages = whiten_(advantages, response_mask)
    return advantages, advantages


@ADVANTAGE_ESTIMATORS.register("remax")
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """The token's undiscounted return minus the score of the prompt's greedy response.

    Watch: If `critic/advantages/mean` stays below 0, lower `rollout.temperature`.

    Source: arXiv 2310.10505
    """
    returns = discounted_returns(token_level_rewards, response_mask, gamma=1.0)
    return returns - on_tokens(reward_baselines, response_mask), returns


@ADVANTAGE_ESTIMATORS.register("coati")
@torch.no_grad()
def compute_coati_advantage(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """For every token, the response's reward minus the value at the last token.

    Advantages are not whitened. The reward is the sum of the row's token rewards: with
    `kl_penalty_per=sequence`, the score minus the KL coefficient times the mean KL. The critic
    learns this reward at every token.

    Watch: If `critic/advantages/mean` stays far from 0, raise `critic.optim.lr`, or set
    `trainer.critic_warmup`.

    Source: ColossalChat, `NaiveExperienceMaker` of 2023
    """
    rewards = sequence_scores(token_level_rewards)
    last_values = values.masked_fill(~is_last_inside(response_mask), 0).sum(dim=-1)
    advantages = on_tokens(rewards - last_values, response_mask)
    return advantages, on_tokens(rewards, response_mask)


@ADVANTAGE_ESTIMATORS.register("rloo", "rloo_vectorized")
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index
) -> tuple[Tensor, Tensor]:
    """The score minus the mean score of the group's other samples.

    Watch: If `actor/grad_norm` is always above `actor.grad_clip`, scale the scores, or bound them
    (`algorithm.score_clip`).

    Source: arXiv 2402.14740
    """
    scores = sequence_scores(token_level_rewards)
    groups = Groups.of(index, scores)
    from_mean_to_others = groups.size / (groups.size - 1).clamp(min=1)
    advantages = groups.centered(scores) * from_mean_to_others[groups.of_row]
    advantages = on_tokens(advantages, response_mask)
    return advantages, advantages


@ADVANTAGE_ESTIMATORS.register("rloo_process")
@torch.no_grad()
def compute_rloo_process_advantage(
    token_level_scores: Tensor, step_ends: Tensor, response_mask: Tensor, index: Index
) -> tuple[Tensor, Tensor]:
    """The summed scores of the token's step and all later steps, minus the other samples' mean.

    The k-th step is compared with the k-th steps of the prompt's other samples; `step_ends` marks
    the last token of each step. A step that no other sample reached keeps its raw sum. The
    estimator is unbiased even if the policy chooses its number of steps.

    Watch: If `actor/grad_norm` is always above `actor.grad_clip`, scale the scores, or bound them
    (`algorithm.score_clip`).

    Source: leave-one-out of arXiv 2402.14740, applied to each step
    """
    ends = step_ends.bool() & response_mask.bool()
    rows, places = ends.nonzero(as_tuple=True)
    num_before = ends.cumsum(dim=-1) - ends.long()  # also the number of a token's own step
    step = num_before[rows, places]
    num_steps = int(ends.sum(dim=-1).max())

    # [rows, steps], not tokens: equal scores then add up to the same bits at any token position
    scores = token_level_scores.new_zeros(len(ends), num_steps)
    scores[rows, step] = token_level_scores[rows, places]
    to_go = scores.flip(-1).cumsum(dim=-1).flip(-1)[rows, step]

    groups = Groups.of(index, token_level_scores[:, 0])
    same_step = Groups.of((groups.of_row[rows] * max(num_steps, 1) + step).tolist(), to_go)
    from_mean_to_others = same_step.size / (same_step.size - 1).clamp(min=1)
    lead = same_step.centered(to_go) * from_mean_to_others[same_step.of_row]

    of_steps = token_level_scores.new_zeros(len(ends), num_steps + 1)  # 0 after the last step
    of_steps[rows, step] = lead
    advantages = zero_outside(of_steps.gather(1, num_before), response_mask)
    return advantages, advantages


@ADVANTAGE_ESTIMATORS.register("opo")
@kl_belongs_in_loss
@torch.no_grad()
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index
) -> tuple[Tensor, Tensor]:
    """The score minus the group's mean, in which samples are weighted by length.

    This baseline has the least variance if gradients grow with length.

    Watch: If `actor/ppo_kl` is not 0, set `actor.ppo_mini_batch_size` to the whole batch and
    `actor.ppo_epochs` to 1.

    Source: arXiv 2505.23585
    """
    scores = sequence_scores(token_level_rewards)
    lengths = torch.count_nonzero(response_mask, dim=-1).to(scores.dtype)
    centered = Groups.of(index, scores).centered(scores, weights=lengths)
    advantages = on_tokens(centered, response_mask)
    return advantages, advantages


@ADVANTAGE_ESTIMATORS.register("gpg")
@kl_belongs_in_loss
@torch.no_grad()
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index
) -> tuple[Tensor, Tensor]:
    """The score minus the group's mean, times `samples / samples with a nonzero score`.

    The factor is verl's; the paper leaves out groups of equal scores instead. A group of one sample
    keeps its raw score, times the factor.

    Watch: If `critic/advantages/max` jumps, few scores may be nonzero: lower the learning rate, or
    use `grpo`.

    Source: arXiv 2504.02546
    """
    scores = sequence_scores(token_level_rewards)
    centered = Groups.of(index, scores).centered(scores)
    scale = len(scores) / torch.count_nonzero(scores).clamp(min=1)
    advantages = on_tokens(centered * scale.to(scores.dtype), response_mask)
    return advantages, advantages


@dataclass(frozen=True)
class Groups:
    """Assigns rows to groups; the samples of one prompt are a group."""

    of_row: Tensor
    """[rows], int64: the number of each row's group."""
    size: Tensor
    """[groups]: the number of rows of each group, in the scores' dtype."""

    @classmethod
    def of(cls, index: Index, scores: Tensor) -> Groups:
        """Group the rows with equal values of `index`."""
        numbers: dict[Any, int] = {}
        of_row = [numbers.setdefault(uid, len(numbers)) for uid in index]
        group = torch.tensor(of_row, dtype=torch.int64, device=scores.device)
        return cls(group, torch.bincount(group).to(scores.dtype))

    def sum(self, scores: Tensor) -> Tensor:
        """Return the sum of each group's scores, [groups]."""
        return torch.zeros_like(self.size).index_add_(0, self.of_row, scores)

    def size_of_row(self) -> Tensor:
        """Return the size of each row's group, [rows]."""
        return self.size[self.of_row]

    def lowest(self, scores: Tensor) -> Tensor:
        """Return the lowest score in each row's group, [rows]."""
        lowest = torch.zeros_like(self.size)
        lowest.scatter_reduce_(0, self.of_row, scores, "amin", include_self=False)
        return lowest[self.of_row]

    def centered(self, scores: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the scores minus their group's mean, in which `weights` can weight the rows.

        The score of a group of one stays unchanged. Equal scores give exactly zero, because the
        mean is computed from distances to the group's lowest score.
        """
        shifted = scores - self.lowest(scores)
        if weights is None:
            mean = self.sum(shifted) / self.size
        else:
            total = self.sum(weights)
            mean = self.sum(shifted * weights) / torch.where(total > 0, total, 1)
        return torch.where(self.size_of_row() > 1, shifted - mean[self.of_row], scores)

    def std(self, centered: Tensor) -> Tensor:
        """Return the standard deviation (n - 1) in each row's group, [rows], of centered scores."""
        variance = self.sum(centered.square()) / (self.size - 1).clamp(min=1)
        return variance.sqrt()[self.of_row]

    def normalized(self, centered: Tensor, epsilon: float) -> Tensor:
        """Return centered scores divided by their group's standard deviation.

        The score of a group of one stays unchanged.
        """
        divided = centered / (self.std(centered) + epsilon)
        return torch.where(self.size_of_row() > 1, divided, centered)


def sequence_scores(token_level_rewards: Tensor) -> Tensor:
    """Return one score per row, [rows]: the sum of its rewards [rows, R]."""
    return token_level_rewards.sum(dim=-1)


def on_tokens(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Copy each row's score to all of its tokens: [rows] -> [rows, R], zero outside the mask."""
    return torch.where(response_mask.bool(), scores.unsqueeze(-1), 0)


BLOCK = 64
"""Number of tokens that one matrix product sums."""


def order_inside_first(response_mask: Tensor) -> Tensor | None:
    """Return the column order that moves each row's tokens inside the mask to the left.

    Return None if they are there already.
    """
    outside = response_mask == 0
    if not bool((outside[:, :-1] > outside[:, 1:]).any()):
        return None
    return outside.to(torch.uint8).argsort(dim=-1, stable=True)


def put_in_order(column: Tensor, order: Tensor | None) -> Tensor:
    """Return the column in the order of `order_inside_first`."""
    return column if order is None else column.gather(-1, order)


def put_back(column: Tensor, order: Tensor | None) -> Tensor:
    """Undo `put_in_order`."""
    return column if order is None else torch.empty_like(column).scatter_(-1, order, column)


def is_last_inside(response_mask: Tensor) -> Tensor:
    """Return a mask of each row's last token inside the mask; empty rows have none."""
    inside = response_mask.bool()
    num_from_here = inside.flip(-1).cumsum(-1).flip(-1)
    return inside & (num_from_here == 1)


def discounted_sum(terms: Tensor, decay: float) -> Tensor:
    """Return out[t], the sum over s >= t of decay^(s - t) * terms[s].

    A matrix product sums within each block; the blocks are then combined from the last to the
    first.
    """
    num_rows, width = terms.shape
    num_blocks = -(-width // BLOCK)
    missing = num_blocks * BLOCK - width
    padded = torch.nn.functional.pad(terms, (0, missing)) if missing else terms

    steps = torch.arange(BLOCK, device=terms.device)
    distance = steps[:, None] - steps[None, :]  # row: summed token; column: first token of the sum
    powers = float(decay) ** distance.clamp(min=0).to(terms.dtype)
    sums = padded.view(num_rows, num_blocks, BLOCK) @ torch.where(distance >= 0, powers, 0)

    to_next_block = float(decay) ** (BLOCK - steps).to(terms.dtype)
    for block in range(num_blocks - 2, -1, -1):
        sums[:, block].addcmul_(sums[:, block + 1, :1], to_next_block)
    return sums.flatten(start_dim=1)[:, :width]


def discounted_returns(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """Return each token's discounted return: the sum of its own and the row's later rewards."""
    order = order_inside_first(response_mask)
    rewards = zero_outside(token_level_rewards, response_mask)
    rewards = put_in_order(rewards, order)
    return put_back(discounted_sum(rewards, gamma), order)


def whiten_(values: Tensor, response_mask: Tensor) -> Tensor:
    """Scale values [rows, R] in place to mean 0 and variance 1, and return them.

    They must be zero outside the mask, and stay so. This needs a third of the memory traffic of an
    out-of-place version.
    """
    inside = (response_mask != 0).to(values.dtype)
    num_inside = torch.count_nonzero(inside)
    values.sub_(values.sum() / num_inside.clamp(min=1)).mul_(inside)
    variance = torch.linalg.vector_norm(values).square() / (num_inside - 1).clamp(min=1)
    return values.mul_(torch.rsqrt(variance + 1e-8))
