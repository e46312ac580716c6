"""Advantage estimators: named pure functions of tensors and a mask.

`PPOTrainer` calls `compute_advantage`.

Tensors are [rows, response tokens], finite outside the mask too; `index` says by equal values which
rows are samples of one prompt. Every estimator returns (advantages, returns), zero outside the
mask, with verl's names and signatures. A token outside the mask inside a row (a tool's answer) is
skipped: its neighbours follow each other. A user's estimator is any such function, chosen by its
dotted path; its parameters' names say what it gets, see `compute_advantage`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from verl_like.registry import Registry
from workers.columns import read_columns, require, write_columns

if TYPE_CHECKING:
    from verl_like.batch.protocol import DataProto

Estimator = Callable[..., tuple[Tensor, Tensor]]

_BLOCK = 64  # tokens that one matrix product sums at once


# --------------------------------------------------------------------------------------- estimators


@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438); needs a critic.

    Returns are the unwhitened advantages plus values; the advantages are then whitened over the
    whole batch's mask.
    """
    inside = response_mask.to(values.dtype)
    order = _compaction(response_mask)
    values = values * inside
    compact_values = _compact(values, order)
    deltas = _compact(token_level_rewards * inside, order).sub_(compact_values)
    deltas[:, :-1].add_(compact_values[:, 1:], alpha=gamma)
    advantages = _expand(_discounted_sum(deltas, gamma * lam), order)
    returns = values.add_(advantages)
    return _whiten_(advantages, inside), returns


@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Any] | np.ndarray,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """GRPO (arXiv 2402.03300): the score less its group's mean, over its group's standard
    deviation.

    Without the division it is Dr. GRPO's (arXiv 2503.20783). A group of one keeps its raw score;
    equal scores give zero.
    """
    group, size = _groups(index, token_level_rewards)
    centered = _centered(token_level_rewards.sum(dim=-1), group, size)
    if norm_adv_by_std_in_grpo:
        square_sum = torch.zeros_like(size).index_add_(0, group, centered.square())
        std = (square_sum / (size - 1).clamp(min=1)).sqrt()
        centered = torch.where(size[group] > 1, centered / (std[group] + epsilon), centered)
    advantages = _spread(centered, response_mask)
    return advantages, advantages


@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[Any] | np.ndarray
) -> tuple[Tensor, Tensor]:
    """RLOO (arXiv 2402.14740): the score less the mean of its group's others; a group of one keeps
    its raw score.
    """
    group, size = _groups(index, token_level_rewards)
    centered = _centered(token_level_rewards.sum(dim=-1), group, size)
    advantages = _spread(centered * (size / (size - 1).clamp(min=1))[group], response_mask)
    return advantages, advantages


@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv 2501.03262): every token's discounted return, whitened over the batch."""
    inside = response_mask.to(token_level_rewards.dtype)
    order = _compaction(response_mask)
    returns = _expand(_discounted_sum(_compact(token_level_rewards * inside, order), gamma), order)
    return _whiten_(returns.clone(), inside), returns


@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Sequence[Any] | np.ndarray
) -> tuple[Tensor, Tensor]:
    """REINFORCE++-baseline (arXiv 2501.03262): the score less its group's mean, whitened over the
    batch's tokens.
    """
    group, size = _groups(index, token_level_rewards)
    centered = _centered(token_level_rewards.sum(dim=-1), group, size)
    advantages = _whiten_(_spread(centered, response_mask), response_mask.to(centered.dtype))
    return advantages, advantages


@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """ReMax (arXiv 2310.10505): every token's return less the score
    of the prompt's greedy answer.
    """
    rewards = token_level_rewards * response_mask
    returns = rewards.flip(-1).cumsum(dim=-1).flip(-1) * response_mask
    return returns - _spread(reward_baselines, response_mask), returns


ADVANTAGE_ESTIMATORS: Registry[Estimator] = Registry("advantage estimator")
ADVANTAGE_ESTIMATORS.register("gae")(compute_gae_advantage_return)
ADVANTAGE_ESTIMATORS.register("grpo")(compute_grpo_outcome_advantage)
ADVANTAGE_ESTIMATORS.register("rloo")(compute_rloo_outcome_advantage)
ADVANTAGE_ESTIMATORS.register("reinforce_plus_plus")(compute_reinforce_plus_plus_outcome_advantage)
ADVANTAGE_ESTIMATORS.register("reinforce_plus_plus_baseline")(
    compute_reinforce_plus_plus_baseline_outcome_advantage
)
ADVANTAGE_ESTIMATORS.register("remax")(compute_remax_outcome_advantage)


SETTINGS = ("gamma", "lam", "norm_adv_by_std_in_grpo")
"""Parameters that `compute_advantage` fills from the configuration, not from the batch."""


def columns_read(adv_estimator: str) -> tuple[str, ...]:
    """The batch's columns that an estimator's parameters ask for."""
    parameters = inspect.signature(ADVANTAGE_ESTIMATORS.look_up(adv_estimator)).parameters
    asked = [
        name
        for name, parameter in parameters.items()
        if name == "index"
        or (parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD)
    ]
    return tuple("uid" if name == "index" else name for name in asked if name not in SETTINGS)


def compute_advantage(
    batch: DataProto,
    adv_estimator: str,
    gamma: float = 1.0,
    lam: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
) -> DataProto:
    """The same batch with columns advantages and returns, from token_level_rewards.

    The estimator is a registered name or a dotted path. Its parameters are filled by name: gamma,
    lam and norm_adv_by_std_in_grpo from the settings, `index` from the column uid, and every other
    one without a default from the tensor column of its name (token_level_rewards, response_mask,
    values, reward_baselines, or the user's own).
    """
    estimator = ADVANTAGE_ESTIMATORS.look_up(adv_estimator)
    settings = {"gamma": gamma, "lam": lam, "norm_adv_by_std_in_grpo": norm_adv_by_std_in_grpo}
    arguments: dict[str, Any] = {
        n: settings[n] for n in inspect.signature(estimator).parameters if n in settings
    }
    for name in columns_read(adv_estimator):
        if name == "uid":
            require(batch, "uid")
            arguments["index"] = batch.non_tensor_batch["uid"]
        else:
            arguments |= read_columns(batch, name)
    advantages, returns = estimator(**arguments)
    return write_columns(batch, advantages=advantages, returns=returns)


# ------------------------------------------------------------------------------------------ helpers


def _whiten_(values: Tensor, inside: Tensor) -> Tensor:
    """`masked_whiten` in place, for values that are zero outside the mask: a third of its memory
    traffic.
    """
    num_inside = torch.count_nonzero(inside)
    values.sub_(values.sum() / num_inside.clamp(min=1)).mul_(inside)
    var = torch.linalg.vector_norm(values).square() / (num_inside - 1).clamp(min=1)
    return values.mul_(torch.rsqrt(var + 1e-8))


def _compaction(response_mask: Tensor) -> Tensor | None:
    """Column order that brings each row's tokens inside the mask to its left; None when they are
    there already.
    """
    outside = response_mask == 0
    if not bool((outside[:, :-1] > outside[:, 1:]).any()):
        return None
    return outside.to(torch.uint8).argsort(dim=-1, stable=True)


def _compact(column: Tensor, order: Tensor | None) -> Tensor:
    return column if order is None else column.gather(-1, order)


def _expand(column: Tensor, order: Tensor | None) -> Tensor:
    return column if order is None else torch.empty_like(column).scatter_(-1, order, column)


def _discounted_sum(terms: Tensor, decay: float) -> Tensor:
    """out[t] = sum over s >= t of decay^(s-t) terms[s]: a matrix product inside blocks, then block
    by block.
    """
    num_rows, width = terms.shape
    num_blocks = -(-width // _BLOCK)
    missing = num_blocks * _BLOCK - width
    padded = torch.nn.functional.pad(terms, (0, missing)) if missing else terms
    steps = torch.arange(_BLOCK, device=terms.device)
    distance = (
        steps[:, None] - steps[None, :]
    )  # from the token summed to (column) back to the token summed (row)
    powers = torch.where(distance >= 0, float(decay) ** distance.clamp(min=0).to(terms.dtype), 0)
    sums = padded.view(num_rows, num_blocks, _BLOCK) @ powers
    to_next_block = float(decay) ** (_BLOCK - steps).to(terms.dtype)
    for block in range(num_blocks - 2, -1, -1):
        sums[:, block].addcmul_(sums[:, block + 1, :1], to_next_block)
    return sums.flatten(start_dim=1)[:, :width]


def _groups(index: Sequence[Any] | np.ndarray, like: Tensor) -> tuple[Tensor, Tensor]:
    """(group number of each row, row count of each group)."""
    numbers: dict[Any, int] = {}
    group = torch.tensor(
        [numbers.setdefault(uid, len(numbers)) for uid in index], device=like.device
    )
    return group, torch.bincount(group).to(like.dtype)


def _centered(scores: Tensor, group: Tensor, size: Tensor) -> Tensor:
    """Scores less their group's mean, exactly zero for equal scores; the score of a group of one
    stays as it is.
    """
    lowest = torch.zeros_like(size).scatter_reduce_(0, group, scores, "amin", include_self=False)
    shifted = scores - lowest[group]
    mean = torch.zeros_like(size).index_add_(0, group, shifted) / size
    return torch.where(size[group] > 1, shifted - mean[group], scores)


def _spread(scores: Tensor, response_mask: Tensor) -> Tensor:
    return torch.where(response_mask.bool(), scores.unsqueeze(-1), 0)
